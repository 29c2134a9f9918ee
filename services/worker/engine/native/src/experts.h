// Gated experts of a layer (see `GatedExperts` in abi.h). Rows are sorted by expert, and each row's outputs are added in the
// order of its experts, so a row's bits do not depend on the other rows.
#pragma once
#include "grouped.h"
#include "layer.h"

namespace {

template <class T>
struct ExpertsCall {
  typedef typename Type<T>::compute C;
  static constexpr int kLanes = Vec<C>::lanes;
  const GatedExperts& p;

  i64 count() const { return p.rows * p.each; }
  const i64* places() const { return p.places + p.experts; }
  bool exists(i64 i) const { return p.chosen[i] >= 0 && p.chosen[i] < p.experts; }

  // Into `places`: the end of each expert's rows, then the sorted place of each chosen expert, or -1.
  void sort() const {
    i64 *ends = p.places, *place = p.places + p.experts, at = 0;
    for (i64 e = 0; e < p.experts; e++) ends[e] = 0;
    for (i64 i = 0; i < count(); i++)
      if (exists(i)) ends[p.chosen[i]]++;
    for (i64 e = 0; e < p.experts; e++) {
      i64 some = ends[e];
      ends[e] = at;
      at += some;
    }
    for (i64 i = 0; i < count(); i++) place[i] = exists(i) ? ends[p.chosen[i]]++ : -1;
  }

  void gather(i64 begin, i64 end) const {
    for (i64 i = begin; i < end; i++)
      if (places()[i] >= 0)
        __builtin_memcpy((T*)p.sorted + places()[i] * p.hidden, (const T*)p.a + i / p.each * p.a_stride, p.hidden * sizeof(T));
  }

  void multiply_all(const void* a, i64 a_stride, const void* matrices, const void* bias, void* out, i64 outputs,
                    i64 inputs) const {
    Grouped call{p.dtype, a, a_stride, matrices, out, outputs, inputs, bias, p.experts, p.places};
    GroupedCall<T>{call}.run();
  }

  void add(i64 row) const {
    const i64* place = places() + row * p.each;
    const C* weights = (const C*)p.weights + row * p.each;
    T* out = (T*)p.out + row * p.hidden;
    for (i64 d = 0; d < p.hidden; d += kLanes) {
      typename Vec<C>::v sum{};
      for (i64 j = 0; j < p.each; j++)
        if (place[j] >= 0) sum += load_part((const T*)p.sorted + place[j] * p.hidden + d, p.hidden - d) * splat(weights[j]);
      store_part(out + d, sum, p.hidden - d);
    }
  }

  void run() const {
    i64 both = 2 * p.inner, grain = most(1, (1 << 14) / p.hidden);
    sort();
    i64 used = p.places[p.experts - 1];
    parallel(count(), grain, [this](i64 begin, i64 end) { gather(begin, end); });
    multiply_all(p.sorted, p.hidden, p.gate_up, p.gate_up_bias, p.between, both, p.hidden);
    T* gates = (T*)p.between;
    parallel(used, most(1, (1 << 14) / p.inner), [=](i64 begin, i64 end) {
      for (i64 r = begin; r < end; r++) silu_mul(gates + r * both, gates + r * both + p.inner, p.inner);
    });
    multiply_all(p.between, both, p.down, p.down_bias, p.sorted, p.hidden, p.inner);
    parallel(p.rows, grain, [this](i64 begin, i64 end) {
      for (i64 r = begin; r < end; r++) add(r);
    });
  }
};

}  // namespace
