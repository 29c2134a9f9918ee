// A transformer layer: normalisation, projections, rotation, the cache, attention, MLP.
#pragma once
#include "attention.h"
#include "gemm.h"

namespace {

// Rounds as the reference does: float64 is normalised in float32; bfloat16 is rounded before multiplying by the weight.
template <class T>
struct Normed;
template <>
struct Normed<float> {
  INLINE vf run(vf x, float share, vf weight) { return x * share * weight; }
};
template <>
struct Normed<bf16> {
  INLINE vf run(vf x, float share, vf weight) {
    bf16 rounded[Vec<float>::lanes];
    store(rounded, x * share);
    return load(rounded) * weight;
  }
};

template <class T>
INLINE void norm_row(const T* x, const T* weight, T* out, i64 width, float eps) {
  constexpr int lanes = Vec<float>::lanes;
  vf squares = vf{};
  for (i64 d = 0; d < width; d += lanes) {
    vf part = load_part(x + d, width - d);
    squares = part * part + squares;
  }
  float share = 1 / square_root(sum_of<float>(squares) / (float)width + eps);
  for (i64 d = 0; d < width; d += lanes) {
    vf part = load_part(x + d, width - d), scale = load_part(weight + d, width - d);
    store_part(out + d, Normed<T>::run(part, share, scale), width - d);
  }
}

// A square that is rounded before it is added, as in the reference: `volatile` prevents a fused multiply-add.
INLINE float square(double x) {
  volatile float rounded = (float)x * (float)x;
  return rounded;
}

// The sum of squares in float32, in torch's order of summation. The reference normalises float64 in float32, too, and
// without the same rounding there, float64 results would differ from the reference's.
INLINE float reference_squares(const double* x, i64 width) {
  constexpr int kLevels = 4, kLanes = 32;
  float sums[kLevels][kLanes] = {};
  i64 rows = width / kLanes, done = 0;
  int digits = 0;
  while (((i64)1 << digits) < rows) digits++;
  int power = digits / kLevels > 4 ? digits / kLevels : 4;
  while (done + ((i64)1 << power) <= rows) {
    for (i64 end = done + ((i64)1 << power); done < end; done++)
      for (int i = 0; i < kLanes; i++) sums[0][i] += square(x[done * kLanes + i]);
    for (int level = 1; level < kLevels; level++) {
      for (int i = 0; i < kLanes; i++) sums[level][i] += sums[level - 1][i], sums[level - 1][i] = 0;
      if (done & ((((i64)1 << power) - 1) << (level * power))) break;
    }
  }
  for (; done < rows; done++)
    for (int i = 0; i < kLanes; i++) sums[0][i] += square(x[done * kLanes + i]);
  for (int level = 1; level < kLevels; level++)
    for (int i = 0; i < kLanes; i++) sums[0][i] += sums[level][i];
  constexpr int kVector = 8;
  i64 d = rows * kLanes;
  for (; d + kVector <= width; d += kVector)
    for (int i = 0; i < kVector; i++) sums[0][i] += square(x[d + i]);
  for (int part = 1; part < kLanes / kVector; part++)
    for (int i = 0; i < kVector; i++) sums[0][i] += sums[0][part * kVector + i];
  float total = 0;
  for (; d < width; d++) total += square(x[d]);
  for (int i = 0; i < kVector; i++) total += sums[0][i];
  return total;
}

INLINE void norm_row(const double* x, const double* weight, double* out, i64 width, float eps) {
  float share = 1 / square_root(reference_squares(x, width) / (float)width + eps);
  for (i64 d = 0; d < width; d++) out[d] = weight[d] * (double)((float)x[d] * share);
}

template <class T>
void norm_rows(const T* x, i64 x_stride, const T* weight, T* out, i64 rows, i64 width, float eps) {
  parallel(rows, most(1, (1 << 17) / width), [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) norm_row(x + r * x_stride, weight, out + r * width, width, eps);
  });
}

// x * cos + swapped halves of x * sin, with the first half of the sines multiplied by `sign`. `out` may be `x`.
template <class T>
INLINE void rotate(const T* x, T* out, const T* cosines, const T* sines, int sign, i64 head_dim) {
  typedef typename Type<T>::compute C;
  constexpr int lanes = Vec<C>::lanes;
  i64 half = head_dim / 2;
  for (i64 d = 0; d < half; d += lanes) {
    auto low = load_part(x + d, half - d), high = load_part(x + half + d, half - d);
    auto sine = load_part(sines + d, half - d) * splat((C)sign);
    auto new_low = high * sine + low * load_part(cosines + d, half - d);
    auto new_high = low * load_part(sines + half + d, half - d) + high * load_part(cosines + half + d, half - d);
    store_part(out + d, new_low, half - d);
    store_part(out + half + d, new_high, half - d);
  }
}

template <class T>
void rotate_all(const Rotation& p) {
  i64 width = p.heads * p.head_dim;
  parallel(p.rows, most(1, (1 << 16) / width), [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++)
      for (i64 n = 0; n < p.heads; n++)
        rotate((const T*)p.x + r * p.row_stride + n * p.head_stride, (T*)p.out + r * width + n * p.head_dim,
               (const T*)p.cosines + r * p.head_dim, (const T*)p.sines + r * p.head_dim, -1, p.head_dim);
  });
}

template <class T>
INLINE void copy_to_kv(T* to, const T* from, i64 count) {
  __builtin_memcpy(to, from, count * sizeof(T));
}

template <class T, class C>
INLINE void copy_to_kv(fp8<C>* to, const T* from, i64 count) {
  for (i64 i = 0; i < count; i++) to[i].bits = fp8_bits(as_float(from[i]));
}

template <class T, class S>
void write_rows(S* kv, const T* k, const T* v, i64 stride, const i64* slots, i64 rows, i64 elements, i64 block_tokens) {
  for (i64 r = 0; r < rows; r++) {
    S* to = kv + (slots[r] / block_tokens * 2 * block_tokens + slots[r] % block_tokens) * elements;
    copy_to_kv(to, k + r * stride, elements);
    copy_to_kv(to + block_tokens * elements, v + r * stride, elements);
  }
}

template <class T>
void write_all(i64 kv_dtype, void* kv, const T* k, const T* v, i64 stride, const i64* slots, i64 rows, i64 elements,
               i64 block_tokens) {
  typedef typename Type<T>::compute C;
  if (kv_dtype == kFp8e4m3)
    write_rows((fp8<C>*)kv, k, v, stride, slots, rows, elements, block_tokens);
  else
    write_rows((T*)kv, k, v, stride, slots, rows, elements, block_tokens);
}

template <class T>
INLINE void silu_mul(T* gate, const T* up, i64 count) {
  constexpr int lanes = Vec<typename Type<T>::compute>::lanes;
  for (i64 d = 0; d < count; d += lanes) {
    auto x = load_part(gate + d, count - d);
    auto activated = x / (exponential(-x) + 1);
    store_part(gate + d, activated * load_part(up + d, count - d), count - d);
  }
}

template <class T>
struct LayerCall {
  const Model& m;
  const Step& s;
  const Layer& layer;

  i64 query() const { return m.heads * m.head_dim; }
  i64 kv() const { return m.kv_heads * m.head_dim; }
  i64 qkv() const { return query() + 2 * kv(); }

  // Into `qkv`: rotated queries and keys, and values.
  void before() const {
    norm_rows((const T*)s.hidden, m.hidden, (const T*)layer.attention_norm, (T*)s.normed, s.rows, m.hidden, (float)m.eps);
    multiply<T, T>((const T*)s.normed, m.hidden, layer.qkv, (T*)s.qkv, qkv(), s.rows, qkv(), m.hidden, layer.qkv_bias, false);
    parallel(s.rows, most(1, (1 << 16) / qkv()), [this](i64 begin, i64 end) {
      for (i64 r = begin; r < end; r++) turn(r);
    });
  }

  void turn(i64 row) const {
    T* heads = (T*)s.qkv + row * qkv();
    const T* table = (const T*)m.rotary + s.positions[row] * 2 * m.head_dim;
    for (i64 n = 0; n < m.heads + m.kv_heads; n++) {
      T* head = heads + n * m.head_dim;
      const T* norm = (const T*)(n < m.heads ? layer.query_norm : layer.key_norm);
      if (norm) norm_row(head, norm, head, m.head_dim, (float)m.eps);
      rotate(head, head, table, table + m.head_dim, 1, m.head_dim);
    }
  }

  void attend() const {
    const T* k = (const T*)s.qkv + query();
    write_all(m.kv_dtype, layer.kv, k, k + kv(), qkv(), s.slots, s.rows, kv(), m.block_tokens);
    attend_all<T>(Attention{m.dtype, m.kv_dtype, m.heads, m.kv_heads, m.head_dim, m.block_tokens, layer.kv, s.qkv, qkv(),
                            s.attended, query(), s.spans});
  }

  void after() const {
    multiply<T, T>((const T*)s.attended, query(), layer.output, (T*)s.hidden, m.hidden, s.rows, m.hidden, query(), layer.output_bias, true);
    norm_rows((const T*)s.hidden, m.hidden, (const T*)layer.mlp_norm, (T*)s.normed, s.rows, m.hidden, (float)m.eps);
    T* gate_up = (T*)s.gate_up;
    i64 both = 2 * m.inner, inner = m.inner;
    multiply<T, T>((const T*)s.normed, m.hidden, layer.gate_up, gate_up, both, s.rows, both, m.hidden, layer.gate_up_bias, false);
    parallel(s.rows, most(1, (1 << 14) / inner), [=](i64 begin, i64 end) {
      for (i64 r = begin; r < end; r++) silu_mul(gate_up + r * both, gate_up + r * both + inner, inner);
    });
    multiply<T, T>(gate_up, both, layer.down, (T*)s.hidden, m.hidden, s.rows, m.hidden, inner, layer.down_bias, true);
  }
};

}  // namespace
