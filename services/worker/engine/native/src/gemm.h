// Products with packed matrices: out[T, outputs] = a[T, inputs] x matrix (+ bias) (+ out).
//
// A matrix [outputs, inputs] is packed as [outputs / 32][inputs][32], in bfloat16 as [outputs / 32][inputs / 2][32][2].
// A tile of a few rows and two vectors of outputs stays in registers while the panel streams by. Each output is summed
// over the inputs in order, starting from bias and `out`, so it is bit-identical in every batch.
#pragma once
#include "vector.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kPanel = BALLAST_PANEL;
#if defined(__aarch64__)
constexpr int kTileRows = 14;
#else
constexpr int kTileRows = VECTOR_BYTES == 64 ? 14 : 6;  // 32 or 16 registers
#endif

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// One step of a tile for float32 and float64: an input of every row, two vectors of outputs.
template <class T, int ROWS>
struct Products {
  typedef typename Vec<T>::v V;
  static constexpr int lanes = Vec<T>::lanes;
  INLINE void run(const T* a, i64 a_stride, const T* b, i64 inputs, V (&c)[ROWS][2]) {
    for (i64 k = 0; k < inputs; k++, b += kPanel) {
      V b0 = load(b), b1 = load(b + lanes);
      prefetch((const char*)b + 4096);
      prefetch((const char*)b + 4096 + 64);
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) {
        V x = splat(a[m * a_stride + k]);
        c[m][0] = x * b0 + c[m][0];
        c[m][1] = x * b1 + c[m][1];
      }
    }
  }
};

template <int ROWS>
struct Products<bf16, ROWS> {
  typedef vf V;
  static constexpr int lanes = Vec<float>::lanes;
  INLINE int32_t pair_of(const bf16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return pair;
  }
  INLINE void run(const bf16* a, i64 a_stride, const bf16* b, i64 inputs, V (&c)[ROWS][2]) {
    for (i64 k = 0; k < inputs; k += 2, b += 2 * kPanel) {
      Words b0 = raw_load<Words>(b), b1 = raw_load<Words>(b + 2 * lanes);
      prefetch((const char*)b + 4096);
      prefetch((const char*)b + 4096 + 64);
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) {
        __m512bh x = (__m512bh)_mm512_set1_epi32(pair_of(a + m * a_stride + k));
        c[m][0] = (V)_mm512_dpbf16_ps((__m512)c[m][0], x, (__m512bh)b0);
        c[m][1] = (V)_mm512_dpbf16_ps((__m512)c[m][1], x, (__m512bh)b1);
      }
#else
      V low0 = (V)(b0 << 16), low1 = (V)(b1 << 16), high0 = (V)(b0 & 0xffff0000), high1 = (V)(b1 & 0xffff0000);
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) {
        uint32_t pair = pair_of(a + m * a_stride + k);
        float low, high;
        uint32_t low_bits = pair << 16, high_bits = pair & 0xffff0000;
        __builtin_memcpy(&low, &low_bits, 4);
        __builtin_memcpy(&high, &high_bits, 4);
        c[m][0] = splat(low) * low0 + c[m][0];
        c[m][1] = splat(low) * low1 + c[m][1];
        c[m][0] = splat(high) * high0 + c[m][0];
        c[m][1] = splat(high) * high1 + c[m][1];
      }
#endif
    }
  }
};

// O: the dtype of the results. The first `valid` outputs of the two vectors exist; the others are padding.
template <class T, class O, int ROWS>
__attribute__((noinline)) void tile(const T* a, i64 a_stride, const T* b, i64 inputs, O* out, i64 out_stride, i64 valid,
                                    const T* bias, bool add) {
  typedef typename Type<T>::compute C;
  typedef typename Vec<C>::v V;
  constexpr int lanes = Vec<C>::lanes;
  V c[ROWS][2];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m++) c[m][0] = c[m][1] = V{};
  if (add)
    for (int m = 0; m < ROWS; m++) {
      c[m][0] = load_part(out + m * out_stride, most(valid, 0));
      c[m][1] = load_part(out + m * out_stride + lanes, most(valid - lanes, 0));
    }
  if (bias) {
    V bias0 = load(bias), bias1 = load(bias + lanes);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) c[m][0] += bias0, c[m][1] += bias1;
  }
  Products<T, ROWS>::run(a, a_stride, b, inputs, c);
  if (valid >= 2 * lanes) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
      store(out + m * out_stride, c[m][0]);
      store(out + m * out_stride + lanes, c[m][1]);
    }
    return;
  }
  for (int m = 0; m < ROWS; m++) {
    store_part(out + m * out_stride, c[m][0], valid);
    if (valid > lanes) store_part(out + m * out_stride + lanes, c[m][1], valid - lanes);
  }
}

template <class T, class O, int ROWS = kTileRows>
INLINE void tile_of(int rows, const T* a, i64 a_stride, const T* b, i64 inputs, O* out, i64 out_stride, i64 valid,
                    const T* bias, bool add) {
  if (rows == ROWS) {
    tile<T, O, ROWS>(a, a_stride, b, inputs, out, out_stride, valid, bias, add);
    return;
  }
  if constexpr (ROWS > 1) tile_of<T, O, ROWS - 1>(rows, a, a_stride, b, inputs, out, out_stride, valid, bias, add);
}

template <class T, class O>
struct GemmCall {
  const T* a;
  i64 a_stride;
  const T* packed;
  O* out;
  i64 out_stride, rows, outputs, inputs;
  const T* bias;
  bool add;

  // Size of the part of `a` that stays in the second-level cache while the panels stream by.
  static constexpr i64 kCachedBytes = 640 << 10;
  // float32 and float64 results can be accumulated in `out` over parts of the inputs without changing a bit; bfloat16
  // results cannot, as `out` is rounded.
  static constexpr bool kSplits = sizeof(T) == sizeof(O) && sizeof(T) != sizeof(bf16);

  void panels(i64 begin, i64 end) const {
    i64 width = kSplits && rows > 2 * kTileRows ? least(inputs, 2048 / (i64)sizeof(T)) : inputs;
    i64 height = most(kCachedBytes / (width * (i64)sizeof(T)) / kTileRows, 2) * kTileRows;
    for (i64 row = 0; row < rows; row += height)
      for (i64 k = 0; k < inputs; k += width)
        for (i64 p = begin; p < end; p++) panel(p, row, least(height, rows - row), k, least(width, inputs - k));
  }

  void panel(i64 p, i64 row, i64 height, i64 k, i64 width) const {
    constexpr i64 two = 2 * Vec<typename Type<T>::compute>::lanes;
    constexpr i64 pair = sizeof(T) == sizeof(bf16) ? 2 : 1;
    i64 tiles = (height + kTileRows - 1) / kTileRows, base = height / tiles, longer = height % tiles;
    for (i64 first = 0; first < kPanel; first += two) {
      i64 column = p * kPanel + first, valid = least(two, outputs - column);
      if (valid <= 0) break;
      const T* b = packed + (p * inputs + k) * kPanel + first * pair;
      for (i64 t = 0, at = row; t < tiles; t++) {
        int count = (int)(base + (t < longer));
        tile_of<T, O>(count, a + at * a_stride + k, a_stride, b, width, out + at * out_stride + column, out_stride,
                      valid, k ? nullptr : (bias ? bias + column : nullptr), add || k);
        at += count;
      }
    }
  }

  void run() const {
    i64 count = (outputs + kPanel - 1) / kPanel;
    i64 grain = most(1, (2 << 20) / (inputs * kPanel * most(rows, 16)));
    parallel(count, grain, [this](i64 begin, i64 end) { panels(begin, end); });
  }
};

template <class T, class O>
INLINE void multiply(const T* a, i64 a_stride, const void* packed, O* out, i64 out_stride, i64 rows, i64 outputs,
                     i64 inputs, const void* bias, bool add) {
  if (rows <= 0) return;
  GemmCall<T, O>{a, a_stride, (const T*)packed, out, out_stride, rows, outputs, inputs, (const T*)bias, add}.run();
}

template <class T>
constexpr i64 kPair = 1;
template <>
constexpr i64 kPair<bf16> = 2;

// Writes rows [first_row, first_row + row_count) of a matrix to their places in `packed`.
template <class T>
void pack_rows(T* packed, i64 first_row, const T* rows, i64 row_count, i64 inputs) {
  constexpr i64 pair = kPair<T>;
  for (i64 row = first_row; row < first_row + row_count;) {
    i64 lane = row % kPanel, count = least(kPanel - lane, first_row + row_count - row);
    T* panel = packed + (row / kPanel) * inputs * kPanel + lane * pair;
    const T* from = rows + (row - first_row) * inputs;
    for (i64 k = 0; k < inputs; k += pair)
      for (i64 i = 0; i < count; i++)
        for (i64 j = 0; j < pair; j++) panel[k * kPanel + i * pair + j] = from[i * inputs + k + j];
    row += count;
  }
}

template <class T>
void unpack_rows(const T* packed, const i64* chosen, i64 count, i64 inputs, T* out) {
  constexpr i64 pair = kPair<T>;
  parallel(count, most(1, 4096 / inputs), [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
      const T* panel = packed + (chosen[r] / kPanel) * inputs * kPanel + (chosen[r] % kPanel) * pair;
      T* to = out + r * inputs;
      for (i64 k = 0; k < inputs; k += pair)
        for (i64 j = 0; j < pair; j++) to[k + j] = panel[k * kPanel + j];
    }
  });
}

}  // namespace
