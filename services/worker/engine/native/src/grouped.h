// Products with matrices as checkpoints store them: out[T, outputs] = a[T, inputs] x matrix [outputs, inputs] (+ bias).
//
// With several matrices (experts), each is multiplied with the rows of its group. A tile of a few rows and outputs
// stays in registers, with a vector of partial sums for each element, while the inputs stream by; then each vector's
// lanes are added. The order of summation depends on the number of inputs only, so an output is bit-identical in every
// batch.
#pragma once
#include "gemm.h"

namespace {

template <class T>
struct GroupedCall {
  typedef typename Type<T>::compute C;
  typedef typename Vec<C>::v V;
  static constexpr int kLanes = Vec<C>::lanes;
  static constexpr int kOutputs = kLanes < 4 ? 2 : 4;  // per tile
#if defined(__aarch64__)
  static constexpr int kRows = 6;
#else
  static constexpr int kRows = VECTOR_BYTES == 64 ? 6 : 3;  // 32 or 16 registers
#endif
  static constexpr int kLine = 64 / sizeof(T) < kLanes ? kLanes : 64 / sizeof(T);  // elements of a cache line
  static constexpr i64 kCachedBytes = 256 << 10;  // rows of `a` that stay in the second-level cache
  static constexpr i64 kPartBytes = 4096;         // inputs whose matrix rows stay in the first-level cache
  const Grouped& p;

  // Meanwhile `ahead` rows of the matrix from `next` on, for a later tile, come from memory.
  template <int ROWS>
  static __attribute__((noinline)) void tile(const T* a, i64 a_stride, const T* matrix, i64 stride, i64 inputs, T* out,
                                             i64 out_stride, i64 valid, const T* bias, bool add, const T* next,
                                             int ahead) {
    V c[ROWS][kOutputs];
    const T* b[kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; n++) b[n] = matrix + least(n, valid - 1) * stride;
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
      for (int n = 0; n < kOutputs; n++) c[m][n] = V{};
    auto step = [&](i64 k) __attribute__((always_inline)) {
      V x[ROWS];
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++) x[m] = load(a + m * a_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < kOutputs; n++) {
        V y = load(b[n] + k);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) c[m][n] = x[m] * y + c[m][n];
      }
    };
    i64 k = 0;
    for (; k + kLine <= inputs; k += kLine) {
      for (int n = 0; n < ahead; n++) prefetch(next + n * stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < kLine; j += kLanes) step(k + j);
    }
    for (; k + kLanes <= inputs; k += kLanes) step(k);
    if (k < inputs)
      for (int n = 0; n < kOutputs; n++) {
        V y = load_part(b[n] + k, inputs - k);
        for (int m = 0; m < ROWS; m++) c[m][n] = load_part(a + m * a_stride + k, inputs - k) * y + c[m][n];
      }
    for (int m = 0; m < ROWS; m++) {
      V sum = sums<C, kOutputs / 2>(c[m]);
      if constexpr (kLanes > kOutputs) sum = folded<kOutputs>(sum);
      T* to = out + m * out_stride;
      if (add) sum += load_part(to, valid);
      if (bias) sum += load_part(bias, valid);
      T part[kLanes];
      store(part, sum);
      if (valid >= kOutputs)
        __builtin_memcpy(to, part, kOutputs * sizeof(T));
      else
        __builtin_memcpy(to, part, valid * sizeof(T));
    }
  }

  template <int S>
  INLINE V folded(V x) {
    x = x + crossed<C, S>(x);
    if constexpr (2 * S < kLanes) return folded<2 * S>(x);
    return x;
  }

  template <int ROWS = kRows>
  INLINE void tile_of(int rows, const T* a, i64 a_stride, const T* matrix, i64 stride, i64 inputs, T* out,
                      i64 out_stride, i64 valid, const T* bias, bool add, const T* next, int ahead) {
    if (rows == ROWS)
      return tile<ROWS>(a, a_stride, matrix, stride, inputs, out, out_stride, valid, bias, add, next, ahead);
    if constexpr (ROWS > 1)
      tile_of<ROWS - 1>(rows, a, a_stride, matrix, stride, inputs, out, out_stride, valid, bias, add, next, ahead);
  }

  // Computes outputs [begin, end) for a group's rows. The inputs are split into parts unless results are bfloat16.
  void group(i64 number, i64 begin, i64 end) const {
    i64 first = number ? p.ends[number - 1] : 0, last = p.ends[number];
    i64 parts = sizeof(T) == sizeof(bf16) ? 1 : (p.inputs * (i64)sizeof(T) + kPartBytes - 1) / kPartBytes;
    i64 width = round_up((p.inputs + parts - 1) / parts, kLanes);
    i64 height = most(kCachedBytes / (width * (i64)sizeof(T)) / kRows, 1) * kRows;
    const T* matrix = (const T*)p.matrices + number * p.outputs * p.inputs;
    const T* bias = p.bias ? (const T*)p.bias + number * p.outputs : nullptr;
    for (i64 row = first; row < last; row += height)
      for (i64 k = 0; k < p.inputs; k += width)
        for (i64 n = begin; n < end; n += kOutputs) {
          i64 count = least(height, last - row), tiles = (count + kRows - 1) / kRows;
          for (i64 t = 0, at = row; t < tiles; t++) {
            i64 some = count / tiles + (t < count % tiles);
            // The tiles share the prefetching for the next outputs.
            i64 from = t * kOutputs / tiles, until = (t + 1) * kOutputs / tiles;
            tile_of((int)some, (const T*)p.a + at * p.a_stride + k, p.a_stride, matrix + n * p.inputs + k, p.inputs,
                    least(width, p.inputs - k), (T*)p.out + at * p.outputs + n, p.outputs,
                    least(kOutputs, p.outputs - n), k ? nullptr : (bias ? bias + n : nullptr), k > 0,
                    matrix + (n + kOutputs + from) * p.inputs + k, (int)(until - from));
            at += some;
          }
        }
  }

  void run() const {
    i64 strips = (p.outputs + kOutputs - 1) / kOutputs, rows = p.ends[p.groups - 1];
    i64 grain = most(1, (1 << 21) / (p.inputs * kOutputs * most(rows / p.groups, 1)));
    parallel(p.groups * strips, grain, [=](i64 begin, i64 end) {
      while (begin < end) {
        i64 number = begin / strips, until = least((number + 1) * strips, end);
        group(number, (begin - number * strips) * kOutputs, least((until - number * strips) * kOutputs, p.outputs));
        begin = until;
      }
    });
  }
};

}  // namespace
