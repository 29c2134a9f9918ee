// Choosing tokens: one task is one row of logits. What a row gives depends on itself alone.
//
// Weights are e to the (logit - best) / temperature in float64; the best has weight 1. Tokens are drawn by inversion in
// the order of the vocabulary, and tokens that equal the last one a filter keeps are kept too.
#pragma once
#include <stdlib.h>

#include "vector.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kWide = Vec<double>::lanes;
constexpr i64 kBlock = 256;        // tokens whose weights are added up together; whole vectors
constexpr double kNothing = -50;   // e to that, times any vocabulary, does not move a sum in float64
constexpr i64 kGroup = 64;          // tokens that are passed over together
constexpr int kGuesses = 3;

INLINE vd widen(const double* p, i64 count) { return load_part(p, count); }
INLINE vd widen(const float* p, i64 count) {
  typedef float Half __attribute__((vector_size(VECTOR_BYTES / 2)));
  Half half = {};
  if (count >= kWide)
    half = raw_load<Half>(p);
  else
    for (i64 i = 0; i < count; i++) half[i] = p[i];
  return __builtin_convertvector(half, vd);
}

INLINE vd lanes_below(i64 count, vd x, double other) {
  return lane_numbers<double>() < (int64_t)count ? x : splat(other);
}

// The largest of a group of logits, of which `count` exist: what tells that none of them matters.
template <class T>
INLINE T group_best(const T* logits, i64 count) {
  constexpr int lanes = Vec<T>::lanes;
  typename Vec<T>::v best = splat(-(T)__builtin_inf());
  if (count >= kGroup) {
    for (i64 i = 0; i < kGroup; i += lanes) {
      typename Vec<T>::v x = load(logits + i);
      best = x > best ? x : best;
    }
    return max_of<T>(best);
  }
  T highest = best[0];
  for (i64 i = 0; i < count; i++) highest = logits[i] > highest ? logits[i] : highest;
  return highest;
}

template <class T>
i64 best_of(const T* logits, i64 size) {
  T highest = -(T)__builtin_inf();
  i64 group = 0;
  for (i64 i = 0; i < size; i += kGroup) {
    T best = group_best(logits + i, size - i);
    if (best > highest) highest = best, group = i;
  }
  for (i64 i = group; i < size; i++)
    if (logits[i] == highest) return i;
  return 0;
}

// The least of the `count` largest values that are at least `floor`: by a heap whose root is the least.
template <class T>
T kth_largest(const T* logits, i64 size, i64 count, T* heap) {
  i64 held = 0;
  for (i64 i = 0; i < size; i++) {
    if (i % kGroup == 0 && held == count && !(group_best(logits + i, size - i) > heap[0])) {
      i += kGroup - 1;
      continue;
    }
    T x = logits[i];
    if (held == count && !(x > heap[0])) continue;
    bool grows = held < count;
    i64 at = grows ? held++ : 0;
    if (grows) {  // up from the end
      for (; at > 0 && heap[(at - 1) / 2] > x; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    } else {  // in the place of the least: down from the root
      for (i64 child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (!(heap[child] < x)) break;
        heap[at] = heap[child], at = child;
      }
    }
    heap[at] = x;
  }
  return heap[0];
}

// The values between the limits, both excluded; `size` is whole vectors. `out` may be where they are.
i64 collect(const double* values, i64 size, double above, double below, double* out) {
  i64 count = 0;
#if defined(__AVX512F__)
  for (i64 i = 0; i < size; i += 8) {
    __m512d x = _mm512_loadu_pd(values + i);
    __mmask8 chosen = _mm512_cmp_pd_mask(x, _mm512_set1_pd(above), _CMP_GT_OQ);
    chosen = _mm512_mask_cmp_pd_mask(chosen, x, _mm512_set1_pd(below), _CMP_LT_OQ);
    _mm512_storeu_pd(out + count, _mm512_maskz_compress_pd(chosen, x));
    count += __builtin_popcount(chosen);
  }
#else
  for (i64 i = 0; i < size; i++) {
    double x = values[i];
    out[count] = x, count += (x > above) & (x < below);
  }
#endif
  return count;
}

// The largest value such that it and all above it have `wanted` of the sum; `values` are rearranged.
double nucleus_end(double* values, i64 count, double wanted) {
  double least_kept = 0;
  const double infinite = __builtin_inf();
  while (count > 0) {
    double a = values[0], b = values[count / 2], c = values[count - 1];
    double pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
    i64 above = 0, below = count, i = 0;
    double mass = 0, equal = 0;
    if (count > kGroup) {  // many: whole vectors, of what is left only one side
      for (i = count; i % kWide; i++) values[i] = 0;
      vd larger = {}, same = {};
      for (i64 at = 0; at < count; at += kWide) {
        vd x = load(values + at);
        larger += x > pivot ? x : vd{};
        same += x == pivot ? x : vd{};
      }
      mass = sum_of<double>(larger), equal = sum_of<double>(same);
      if (mass >= wanted) {
        count = collect(values, i, pivot, infinite, values);
      } else if (mass + equal >= wanted) {
        return pivot;
      } else {
        least_kept = pivot, wanted -= mass + equal;
        count = collect(values, i, 0, pivot, values);
      }
      continue;
    }
    while (i < below) {
      double x = values[i];
      if (x > pivot) {
        mass += x, values[i++] = values[above], values[above++] = x;
      } else if (x < pivot) {
        values[i] = values[--below], values[below] = x;
      } else {
        equal += x, i++;
      }
    }
    if (mass >= wanted) {
      count = above;
    } else if (mass + equal >= wanted) {
      return pivot;
    } else {
      least_kept = pivot, wanted -= mass + equal;
      values += below, count -= below;
    }
  }
  return least_kept;  // by rounding they have a little less than wanted: all are kept
}

template <class T>
struct Row {
  const T* logits;
  i64 size, padded;  // whole blocks
  double* weights;   // [padded]
  double* spare;     // [padded], and room for a vector behind

  // The weights of tokens whose logit is at least `floor`; of the others, and behind the end, zero. Returns their sum
  // and those of the weights above each of the guesses.
  double weigh(double best, double sharpness, double floor, const double* guesses, double* above) const {
    vd total = {}, parts[kGuesses] = {};
    double lowest = best + kNothing / sharpness;
    lowest = floor > lowest ? floor : lowest;
    for (i64 i = 0; i < padded; i += kWide) {
      if (i % kGroup == 0 && !((double)group_best(logits + i, size - i) >= lowest)) {
        __builtin_memset(weights + i, 0, kGroup * sizeof(double));
        i += kGroup - kWide;
        continue;
      }
      vd x = widen(logits + i, most(0, size - i));
      vd weight = exponential((x - best) * sharpness);
      weight = x >= lowest ? weight : vd{};
      if (i + kWide > size) weight = lanes_below(size - i, weight, 0);
      store(weights + i, weight);
      total += weight;
      if (guesses)
        for (int g = 0; g < kGuesses; g++) parts[g] += weight > guesses[g] ? weight : vd{};
    }
    for (int g = 0; guesses && g < kGuesses; g++) above[g] = sum_of<double>(parts[g]);
    return sum_of<double>(total);
  }

  double nucleus(double best, double sharpness, double floor, double share) const {
    const double guesses[kGuesses] = {1e-2, 3e-4, 3e-6};
    double above[kGuesses];
    double wanted = weigh(best, sharpness, floor, guesses, above) * share, limit = 0;
    for (int g = kGuesses - 1; g >= 0; g--)
      if (above[g] > wanted * (1 + 1e-9)) limit = guesses[g];
    i64 count = collect(weights, padded, limit, __builtin_inf(), spare);
    return nucleus_end(spare, count, wanted);
  }

  double block_sum(i64 first, double least_weight) const {
    vd sum = {};
    for (i64 i = first; i < first + kBlock; i += kWide) {
      vd weight = load(weights + i);
      sum += weight >= least_weight ? weight : vd{};
    }
    return sum_of<double>(sum);
  }

  i64 draw(double least_weight, double uniform) const {
    double total = 0;
    for (i64 i = 0; i < padded; i += kBlock) total += spare[i / kBlock] = block_sum(i, least_weight);
    double target = uniform * total, before = 0;
    i64 last = size - 1;
    for (i64 block = 0; block < padded; block += kBlock) {
      double sum = spare[block / kBlock];
      if (!(before + sum > target)) {
        before += sum;
        continue;
      }
      double running = before;
      for (i64 i = block; i < least(size, block + kBlock); i++) {
        if (!(weights[i] >= least_weight) || weights[i] == 0) continue;
        running += weights[i], last = i;
        if (running > target) return i;
      }
      return last;  // by rounding the block's tokens have a little less than the block
    }
    for (i64 i = size - 1; i >= 0; i--)
      if (weights[i] > 0 && weights[i] >= least_weight) return i;
    return last;
  }
};

template <class T>
i64 choose(const Sampling& call, i64 r, double* memory) {
  const T* logits = (const T*)call.logits + r * call.stride;
  i64 size = call.vocabulary, padded = round_up(size, kBlock), first_best = best_of(logits, size);
  double temperature = call.temperatures[r], best = (double)logits[first_best];
  if (!(temperature > 0)) return first_best;
  Row<T> row = {logits, size, padded, memory, memory + padded};
  double floor = -__builtin_inf(), lowest = best / temperature;
  if (call.min_p[r] > 0) {  // as a logit: the least of those whose quotient is high enough
    lowest += __builtin_log(call.min_p[r]);
    vd kept = splat(best);
    for (i64 i = 0; i < size; i += kWide) {
      vd x = widen(logits + i, size - i);
      if (i + kWide > size) x = lanes_below(size - i, x, best);
      kept = (x / temperature >= lowest) & (x < kept) ? x : kept;
    }
    floor = -max_of<double>(-kept);
  }
  if (call.top_k[r] > 0 && call.top_k[r] < size) {
    double kth = (double)kth_largest(logits, size, call.top_k[r], (T*)memory);
    floor = kth > floor ? kth : floor;
  }
  double least_weight = 0;
  if (call.top_p[r] < 1)
    least_weight = row.nucleus(best, 1 / temperature, floor, call.top_p[r]);
  else
    row.weigh(best, 1 / temperature, floor, nullptr, nullptr);
  return row.draw(least_weight, call.uniforms[r]);
}

template <class T>
void sample_rows(const Sampling& call) {
  i64 padded = round_up(call.vocabulary, kBlock);
  parallel(call.rows, most(1, (1 << 15) / call.vocabulary), [&](i64 begin, i64 end) {
    double* memory = nullptr;
    for (i64 r = begin; r < end; r++) {
      if (!memory && call.temperatures[r] > 0) memory = (double*)malloc((2 * padded + 64) * sizeof(double));
      call.chosen[r] = call.temperatures[r] > 0 && !memory ? -1 : choose<T>(call, r, memory);
    }
    free(memory);
  });
}

// The logarithm of the sum of e to the logits, less the best; and the best themselves, equal ones in their order.
template <class T>
double log_total(const T* logits, i64 size, double best) {
  vd total = {};
  for (i64 i = 0; i < size; i += kWide) {
    vd weight = exponential(widen(logits + i, size - i) - best);
    weight = widen(logits + i, size - i) - best > -700.0 ? weight : vd{};
    total += i + kWide > size ? lanes_below(size - i, weight, 0) : weight;
  }
  return __builtin_log(sum_of<double>(total));
}

template <class T>
void rank_row(const T* logits, i64 size, i64 count, i64* indices, double* values, double* totals) {
  i64 first_best = best_of(logits, size);
  totals[0] = (double)logits[first_best];
  totals[1] = log_total(logits, size, totals[0]);
  i64 held = 0;
  for (i64 i = 0; i < size; i++) {
    if (i % kGroup == 0 && held == count && !(held && (double)group_best(logits + i, size - i) > values[held - 1])) {
      i += kGroup - 1;
      continue;
    }
    double x = (double)logits[i];
    if (held == count && !(held && x > values[held - 1])) continue;
    i64 at = held < count ? held++ : held - 1;
    for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
    values[at] = x, indices[at] = i;
  }
}

}  // namespace
