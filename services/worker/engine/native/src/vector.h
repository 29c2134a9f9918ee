// Vectors of the instruction set's width (VECTOR_BYTES), built on the compiler's vector types.
//
// A product and a sum in one expression become a fused multiply-add if the instruction set has one. So a value depends
// on the instruction set, but not on whether a loop or its tail computed it: tails are whole vectors padded with zeros.
#pragma once
#include "abi.h"

#define INLINE static inline __attribute__((always_inline))

namespace {

struct bf16 {
  uint16_t bits;
};

// A float8 (E4M3) of KV: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, all ones is NaN. Converted to
// C for computation.
template <class C>
struct fp8 {
  uint8_t bits;
};

template <class T>
struct Type;  // stored type -> the type in which it is computed
template <>
struct Type<float> {
  typedef float compute;
};
template <>
struct Type<double> {
  typedef double compute;
};
template <>
struct Type<bf16> {
  typedef float compute;
};

template <class C>
struct Type<fp8<C>> {
  typedef C compute;
};

template <class C>
struct Vec;
template <>
struct Vec<float> {
  typedef float v __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t i __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int lanes = VECTOR_BYTES / 4;
};
template <>
struct Vec<double> {
  typedef double v __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t i __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int lanes = VECTOR_BYTES / 8;
};
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

typedef Vec<float>::v vf;
typedef Vec<double>::v vd;

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 round_up(i64 n, i64 step) { return (n + step - 1) / step * step; }

template <class V, class P>
INLINE V raw_load(const P* p) {
  V r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}

INLINE vf load(const float* p) { return raw_load<vf>(p); }
INLINE vd load(const double* p) { return raw_load<vd>(p); }
INLINE vf load(const bf16* p) {
  return (vf)(__builtin_convertvector(raw_load<HalfWords>(p), Words) << 16);
}

// Converts as many numbers as W has words. Subnormals (exponent 0) are their mantissa in steps of 2^-9.
template <class F, class W, class C>
INLINE F from_fp8(const fp8<C>* p) {
  W x;
  for (int i = 0; i < (int)(sizeof x / 4); i++) x[i] = p[i].bits;  // faster than GCC's conversion of vectors of bytes
  W bits = (x & 0x7f) << 20, sign = (x & 0x80) << 24;
  F small = (F)(bits + (121u << 23)) - 0x1p-6f;
  W size = bits < (1u << 23) ? (W)small : bits + (120u << 23);
  size = bits == (0x7fu << 20) ? size | 0x7f800000 : size;
  return (F)(size | sign);
}

typedef uint32_t HalfOfWords __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef float HalfOfFloats __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE vf load(const fp8<float>* p) { return from_fp8<vf, Words>(p); }
INLINE vd load(const fp8<double>* p) { return __builtin_convertvector(from_fp8<HalfOfFloats, HalfOfWords>(p), vd); }

INLINE float as_float(float x) { return x; }
INLINE float as_float(double x) { return (float)x; }
INLINE float as_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float r;
  __builtin_memcpy(&r, &bits, sizeof r);
  return r;
}

// Rounds to nearest, ties to even, and saturates at 448. NaN stays NaN.
INLINE uint8_t fp8_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  uint32_t least = size < 0x43e00000 ? size : 0x43e00000;
  float small;
  __builtin_memcpy(&small, &least, sizeof small);
  small += 0x1p14f;  // its last bit is worth 2^-9
  uint32_t rounded = (least + 0x7ffff + (least >> 20 & 1)) >> 20, below;
  __builtin_memcpy(&below, &small, sizeof below);
  uint32_t found = least < (121u << 23) ? below - 0x46800000 : rounded - (120 << 3);
  return (uint8_t)(sign | (size > 0x7f800000 ? 0x7f : found));
}

INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE void store(double* p, vd x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE void store(bf16* p, vf x) {  // to the nearest, ties to even
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Words quiet = (bits >> 16) | 0x40;
  HalfWords half = __builtin_convertvector((Words)(x == x) ? rounded : quiet, HalfWords);
  __builtin_memcpy(p, &half, sizeof half);
}

template <class C>
INLINE typename Vec<C>::v splat(C x) {
  return x - typename Vec<C>::v{};  // exact, -0 included
}

// The first `count` of a vector's lanes; the others are zero.
template <class T>
INLINE auto load_part(const T* p, i64 count) -> decltype(load(p)) {
  constexpr int lanes = Vec<typename Type<T>::compute>::lanes;
  if (count >= lanes) return load(p);
  T part[lanes];
  __builtin_memset(part, 0, sizeof part);
  __builtin_memcpy(part, p, count * sizeof(T));
  return load(part);
}

template <class T, class V>
INLINE void store_part(T* p, V x, i64 count) {
  constexpr int lanes = Vec<typename Type<T>::compute>::lanes;
  if (count >= lanes) {
    store(p, x);
    return;
  }
  T part[lanes];
  store(part, x);
  __builtin_memcpy(p, part, count * sizeof(T));
}

template <class C>
INLINE typename Vec<C>::i lane_numbers() {
  typename Vec<C>::i r;
  for (int i = 0; i < Vec<C>::lanes; i++) r[i] = i;
  return r;
}

#if defined(__clang__)  // lacks GCC's builtin of this name; for compile-time masks
template <class V, class M>
INLINE V __builtin_shuffle(V a, V b, M mask) {
  constexpr int lanes = sizeof(V) / sizeof(a[0]);
  V r;
  for (int i = 0; i < lanes; i++) r[i] = mask[i] < lanes ? a[mask[i]] : b[mask[i] - lanes];
  return r;
}

template <class V, class M>
INLINE V __builtin_shuffle(V a, M mask) {
  return __builtin_shuffle(a, a, mask);
}
#endif

// Lane masks of `pair_up`, made once per width and step.
template <class C, int S>
struct PairMasks {
  typename Vec<C>::i straight, crossed;
  INLINE PairMasks make() {
    PairMasks m;
    constexpr int lanes = Vec<C>::lanes;
    for (int i = 0; i < lanes; i++) {
      m.straight[i] = i & S ? i + lanes : i;
      m.crossed[i] = i & S ? (i ^ S) + lanes : i ^ S;
    }
    return m;
  }
};

// Sums of pairs of lanes that are S apart: of b in lanes whose index has bit S, of a in the others.
template <class C, int S>
INLINE typename Vec<C>::v pair_up(typename Vec<C>::v a, typename Vec<C>::v b) {
  PairMasks<C, S> m = PairMasks<C, S>::make();
  return __builtin_shuffle(a, b, m.straight) + __builtin_shuffle(a, b, m.crossed);
}

// Horizontal sums of as many vectors as each has lanes: lane i of the result is the sum of vector i.
template <class C, int S = Vec<C>::lanes / 2>
INLINE typename Vec<C>::v sums(typename Vec<C>::v* x) {
#pragma GCC unroll 8
  for (int i = 0; i < S; i++) x[i] = pair_up<C, S>(x[i], x[i + S]);
  if constexpr (S > 1) return sums<C, S / 2>(x);
  return x[0];
}

template <class C, int S>
INLINE typename Vec<C>::v crossed(typename Vec<C>::v a) {
  typename Vec<C>::i m;
  for (int i = 0; i < Vec<C>::lanes; i++) m[i] = i ^ S;
  return __builtin_shuffle(a, m);
}

template <class C, int S = Vec<C>::lanes / 2>
INLINE C sum_of(typename Vec<C>::v a) {
  a = a + crossed<C, S>(a);
  if constexpr (S > 1) return sum_of<C, S / 2>(a);
  return a[0];
}

template <class C, int S = Vec<C>::lanes / 2>
INLINE C max_of(typename Vec<C>::v a) {
  typename Vec<C>::v b = crossed<C, S>(a);
  a = a > b ? a : b;
  if constexpr (S > 1) return max_of<C, S / 2>(a);
  return a[0];
}

// exp(x) by a Taylor series around the nearest power of two, to about one unit in the last place. Results are clamped
// to the range of normal numbers; NaN stays NaN.
INLINE vf exponential(vf x) {
  const vf magic = splat(12582912.0f);
  x = x < -87.3f ? splat(-87.3f) : x;
  x = x > 88.3f ? splat(88.3f) : x;
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = r * (1.0f / 5040) + (1.0f / 720);
  p = p * r + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (vf)((Vec<float>::i)p + ((Vec<float>::i)shifted << 23));
}

INLINE vd exponential(vd x) {
  const vd magic = splat(6755399441055744.0);
  x = x < -708.0 ? splat(-708.0) : x;
  x = x > 709.0 ? splat(709.0) : x;
  vd shifted = x * 1.4426950408889634 + magic;
  vd n = shifted - magic;
  vd r = x - n * 0.693147180369123816490;
  r = r - n * 1.90821492927058770002e-10;
  vd p = r * (1.0 / 6227020800.0) + (1.0 / 479001600.0);
  p = p * r + (1.0 / 39916800.0);
  p = p * r + (1.0 / 3628800.0);
  p = p * r + (1.0 / 362880.0);
  p = p * r + (1.0 / 40320.0);
  p = p * r + (1.0 / 5040.0);
  p = p * r + (1.0 / 720.0);
  p = p * r + (1.0 / 120.0);
  p = p * r + (1.0 / 24.0);
  p = p * r + (1.0 / 6.0);
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return (vd)((Vec<double>::i)p + ((Vec<double>::i)shifted << 52));
}

INLINE float square_root(float x) { return __builtin_sqrtf(x); }
INLINE double square_root(double x) { return __builtin_sqrt(x); }

// Runs `body(begin, end)` over [0, count) on this thread and idle threads of the pool.
template <class F>
INLINE void parallel(i64 count, i64 grain, const F& body) {
  if (count <= grain) {
    if (count > 0) body(0, count);
    return;
  }
  ballast_parallel(
      count, grain, [](void* context, i64 begin, i64 end) { (*(const F*)context)(begin, end); }, (void*)&body);
}

}  // namespace
