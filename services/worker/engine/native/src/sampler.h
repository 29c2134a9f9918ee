// Sampling: one task is one row of logits. A row's token depends on that row alone.
//
// Weights are exp((logit - best) / temperature) in float64, so the best token has weight 1. Tokens are drawn by
// inversion in vocabulary order, and tokens that tie with the last one that a filter keeps are also kept.
#pragma once
#include <stdlib.h>

#include "vector.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kWide = Vec<double>::lanes;
constexpr i64 kBlock = 256;       // tokens that are skipped, or whose weights are summed, at once
constexpr double kNothing = -50;  // exp of this, times any vocabulary size, does not change a float64 sum
constexpr i64 kMany = 64;         // with more values than this, use vectors

INLINE vd widen(const double* p) { return load(p); }
INLINE vd widen(const float* p) {
  typedef float Half __attribute__((vector_size(VECTOR_BYTES / 2)));
  return __builtin_convertvector(raw_load<Half>(p), vd);
}

// The first `count` logits of a vector; the remaining lanes are -inf.
template <class T>
INLINE vd widen_part(const T* p, i64 count) {
  if (count >= kWide) return widen(p);
  T part[kWide];
  for (i64 i = 0; i < kWide; i++) part[i] = i < count ? p[i] : -(T)__builtin_inf();
  return widen(part);
}

// The largest of up to one block of logits. NaN is ignored.
template <class T>
INLINE T largest_of(const T* logits, i64 count) {
  typedef typename Vec<T>::v V;
  constexpr int lanes = Vec<T>::lanes;
  V best[2] = {splat(-(T)__builtin_inf()), splat(-(T)__builtin_inf())};
  i64 i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes)
    for (int j = 0; j < 2; j++) {
      V x = load(logits + i + j * lanes);
      best[j] = x > best[j] ? x : best[j];
    }
  T highest = max_of<T>(best[0] > best[1] ? best[0] : best[1]);
  for (; i < count; i++) highest = logits[i] > highest ? logits[i] : highest;
  return highest;
}

#if defined(__AVX512F__)
// The bits of 2^(j / 16) minus j << 48, which `weight_of` adds again along with the exponent.
struct Powers {
  alignas(64) uint64_t bits[16];
  constexpr Powers() : bits() {
    for (int j = 0; j < 16; j++)
      bits[j] = __builtin_bit_cast(uint64_t, __builtin_exp2(j / 16.0)) - ((uint64_t)j << 48);
  }
};
constexpr Powers kPowers;

// exp(x) for x in [-700, 0], to about one unit in the last place; undefined for other x.
INLINE vd weight_of(vd x) {
  const vd magic = splat(6755399441055744.0);
  vd shifted = x * 23.083120654223414 + magic;  // 16 / ln(2)
  vd n = shifted - magic;
  vd r = x - n * 0.04332169878489367;  // ln(2) / 16 without its last 16 bits
  r = r - n * 1.0291218489310676e-13;
  vd p = r * (1.0 / 720) + (1.0 / 120 + 8.1e-8);  // 8.1e-8: most of what the seventh power would add
  p = p * r + (1.0 / 24);
  p = p * r + (1.0 / 6);
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r;
  __m512i k = (__m512i)shifted;
  __m512d power = _mm512_permutex2var_pd(_mm512_load_pd(kPowers.bits), k, _mm512_load_pd(kPowers.bits + 8));
  vd scale = (vd)_mm512_add_epi64((__m512i)power, _mm512_slli_epi64(k, 48));
  return scale * p + scale;
}
#else
INLINE vd weight_of(vd x) { return exponential(x); }
#endif

// The smallest of the `count` largest values (at least one), found with a min-heap.
template <class T>
T kth_largest(const T* values, i64 size, i64 count, T* heap) {
  i64 held = 0;
  for (i64 i = 0; i < size; i++) {
    T x = values[i];
    if (held == count && !(x > heap[0])) continue;
    bool grows = held < count;
    i64 at = grows ? held++ : 0;
    if (grows) {  // sift up from the end
      for (; at > 0 && heap[(at - 1) / 2] > x; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    } else {  // replace the smallest: sift down from the root
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

// Collects the values between the limits, both excluded. `size` is a multiple of the lanes; `out` may be `values`.
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

// The largest of `values` such that it and all larger ones sum to at least `wanted`. Reorders `values`.
double nucleus_end(double* values, i64 count, double wanted) {
  double least_kept = 0;
  const double infinite = __builtin_inf();
  while (count > 0) {
    double a = values[0], b = values[count / 2], c = values[count - 1];
    double pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
    i64 above = 0, below = count, i = 0;
    double mass = 0, equal = 0;
    if (count > kMany) {  // many: use vectors, and keep only the values on the side to search next
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
  return least_kept;  // rounding leaves the sum below `wanted`: keep all
}

// Scratch memory for sampling from one row.
template <class T>
struct Scratch {
  T* block_best;    // the largest logit of each block
  double* sums;     // sum of each block's weights
  double* weights;  // [whole blocks], like the next two; allocated only if a row has a filter
  double* spare;
  int32_t* tokens;
};

#if defined(__AVX512F__)
// Writes the token ids and values of the logits in one vector that are at least `limit`. Writes whole vectors.
INLINE i64 keep(const float* p, float limit, i64 first, int32_t* tokens, float* values) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 x = _mm512_loadu_ps(p);
  __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ);
  __m512i numbers = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)first));
  _mm512_storeu_si512(tokens, _mm512_maskz_compress_epi32(kept, numbers));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(kept, x));
  return __builtin_popcount(kept);
}
INLINE i64 keep(const double* p, double limit, i64 first, int32_t* tokens, double* values) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m512d x = _mm512_loadu_pd(p);
  __mmask8 kept = _mm512_cmp_pd_mask(x, _mm512_set1_pd(limit), _CMP_GE_OQ);
  __m256i numbers = _mm256_add_epi32(lanes, _mm256_set1_epi32((int32_t)first));
  _mm256_storeu_si256((__m256i*)tokens, _mm256_maskz_compress_epi32(kept, numbers));
  _mm512_storeu_pd(values, _mm512_maskz_compress_pd(kept, x));
  return __builtin_popcount(kept);
}
#endif

// Appends the token ids and values of the logits in [begin, end) that are at least `limit`, in order. Both outputs need
// room for `end` entries.
template <class T>
INLINE i64 keep_all(const T* logits, i64 begin, i64 end, T limit, i64 count, int32_t* tokens, T* values) {
  i64 i = begin;
#if defined(__AVX512F__)
  constexpr int lanes = Vec<T>::lanes;
  for (; i + lanes <= end; i += lanes) count += keep(logits + i, limit, i, tokens + count, values + count);
#endif
  for (; i < end; i++) tokens[count] = (int32_t)i, values[count] = logits[i], count += logits[i] >= limit;
  return count;
}

// The index of the first logit equal to `value`, searching from `from`; 0 if there is none.
template <class T>
i64 first_of(const T* logits, i64 from, i64 size, T value) {
  for (i64 i = from; i < size; i++)
    if (logits[i] == value) return i;
  return 0;
}

template <class T>
struct Row {
  const T* logits;
  i64 size;
  double best, sharpness;  // 1 / temperature
  double lowest;           // logits below this have no weight
  Scratch<T> scratch;

  i64 blocks() const { return (size + kBlock - 1) / kBlock; }

  INLINE vd weigh(vd x, double sharpness, double best, double lowest) {
    vd weight = weight_of((x - best) * sharpness);
    return x >= lowest ? weight : vd{};
  }

  double weigh_block(i64 first) const {
    vd sum[2] = {};
    i64 i = first, end = least(size, first + kBlock);
    for (; i + 2 * kWide <= end; i += 2 * kWide)
      for (int j = 0; j < 2; j++) sum[j] += weigh(widen(logits + i + j * kWide), sharpness, best, lowest);
    for (; i < end; i += kWide) sum[0] += weigh(widen_part(logits + i, end - i), sharpness, best, lowest);
    return sum_of<double>(sum[0] + sum[1]);
  }

  // The sum of all weights. Stores each block's sum in `scratch.sums`.
  double total() const {
    double sum = 0;
    for (i64 b = 0; b < blocks(); b++) {
      bool matters = (double)scratch.block_best[b] >= lowest;
      sum += scratch.sums[b] = matters ? weigh_block(b * kBlock) : 0;
    }
    return sum;
  }

  i64 draw(double uniform) const {
    double target = uniform * total(), before = 0, weights[kBlock];
    for (i64 b = 0; b < blocks(); b++) {
      double sum = scratch.sums[b];
      if (!(before + sum > target)) {
        before += sum;
        continue;
      }
      i64 first = b * kBlock, count = least(kBlock, size - first);
      for (i64 i = 0; i < count; i += kWide)
        store(weights + i, weigh(widen_part(logits + first + i, count - i), sharpness, best, lowest));
      return first + place_of(weights, count, 0, target - before);
    }
    for (i64 i = size - 1; i > 0; i--)
      if ((double)logits[i] >= lowest) return i;
    return 0;
  }

  // The index at which the running sum of the weights of at least `least_weight` exceeds `wanted`; the last of these if
  // rounding keeps it from doing so.
  static i64 place_of(const double* weights, i64 count, double least_weight, double wanted) {
    double running = 0;
    i64 last = 0;
    for (i64 i = 0; i < count; i++) {
      if (!(weights[i] >= least_weight) || weights[i] == 0) continue;
      running += weights[i], last = i;
      if (running > wanted) break;
    }
    return last;
  }

  // Draws from the smallest set of most probable tokens that has `share` of the total weight (top-p).
  //
  // Tokens lighter than (1 - share) * total / V are outside this nucleus, since all of them together have less than
  // (1 - share) of the weight. So only heavier tokens are candidates; at first only those of at least a third of the
  // mean weight, which is mostly enough.
  i64 draw_from_nucleus(double uniform, double share) const {
    double all = total(), mean = all / (double)size, found = 0;
    i64 count = (1 - share) * 3 < 1 ? candidates(mean / 3, &found) : 0;
    if (!(found > share * all * (1 + 1e-9))) count = candidates((1 - share) * mean, &found);
    if (count == 0) return first_of(logits, 0, size, (T)best);  // infinite logits have no weights
    double* weights = scratch.weights;
    __builtin_memcpy(scratch.spare, weights, (size_t)count * sizeof(double));
    double least_weight = nucleus_end(scratch.spare, count, share * all), kept = 0;
    for (i64 i = count; i % kBlock; i++) weights[i] = 0;
    for (i64 first = 0; first < count; first += kBlock)
      kept += scratch.sums[first / kBlock] = block_sum(weights + first, least_weight);
    double target = uniform * kept, before = 0;
    for (i64 first = 0; first < count; first += kBlock) {
      double sum = scratch.sums[first / kBlock];
      if (before + sum > target)
        return scratch.tokens[first + place_of(weights + first, kBlock, least_weight, target - before)];
      before += sum;
    }
    return scratch.tokens[place_of(weights, count, least_weight, __builtin_inf())];
  }

  static double most_of(double a, double b) { return a > b ? a : b; }

  static double block_sum(const double* weights, double least_weight) {
    vd sum = {};
    for (i64 i = 0; i < kBlock; i += kWide) {
      vd weight = load(weights + i);
      sum += weight >= least_weight ? weight : vd{};
    }
    return sum_of<double>(sum);
  }

  // Writes the tokens whose logit is at least `limit` to `tokens`, and these logits to `spare`, in vocabulary order.
  i64 tokens_from(T limit) const {
    i64 count = 0;
    for (i64 b = 0; b < blocks(); b++)
      if (scratch.block_best[b] >= limit) {
        i64 end = least(size, (b + 1) * kBlock);
        count = keep_all(logits, b * kBlock, end, limit, count, scratch.tokens, (T*)scratch.spare);
      }
    return count;
  }

  // Writes all tokens of at least `least_weight` (and possibly a few lighter ones), their weights and the weights' sum.
  i64 candidates(double least_weight, double* sum) const {
    double limit = most_of(best + __builtin_log(least_weight) / sharpness, lowest);
    i64 count = tokens_from((T)(limit - 1e-5 - 1e-6 * __builtin_fabs(limit)));
    vd total = {};
    for (i64 i = 0; i < count; i += kWide) {
      vd weight = weigh(widen_part((const T*)scratch.spare + i, count - i), sharpness, best, lowest);
      store(scratch.weights + i, weight), total += weight;
    }
    *sum = sum_of<double>(total);
    return count;
  }

  // The `count`-th best logit. No logit below the `count`-th best of the blocks' maxima is among the best.
  T kth_best(i64 count) const {
    T* heap = (T*)scratch.weights;
    if (count > blocks()) return kth_largest(logits, size, count, heap);
    i64 found = tokens_from(kth_largest(scratch.block_best, blocks(), count, heap));
    return found ? kth_largest((const T*)scratch.spare, found, count, heap) : -(T)__builtin_inf();
  }

  // The smallest logit that min-p and top-k keep; -inf without filters.
  double floor_of(double temperature, double min_p, i64 top_k) const {
    double floor = -__builtin_inf();
    if (min_p > 0) {
      double least_quotient = best / temperature + __builtin_log(min_p);
      vd kept = splat(best);
      for (i64 b = 0; b < blocks(); b++) {
        if (!((double)scratch.block_best[b] / temperature >= least_quotient)) continue;
        for (i64 i = b * kBlock, end = least(size, i + kBlock); i < end; i += kWide) {
          vd x = widen_part(logits + i, end - i);
          kept = ((x / temperature >= least_quotient) & (x < kept)) ? x : kept;
        }
      }
      floor = -max_of<double>(-kept);
    }
    return top_k > 0 && top_k < size ? most_of(floor, (double)kth_best(top_k)) : floor;
  }
};

template <class T>
i64 choose(const Sampling& call, i64 r, const Scratch<T>& scratch) {
  const T* logits = (const T*)call.logits + r * call.stride;
  i64 size = call.vocabulary, best_block = 0;
  for (i64 b = 0; b * kBlock < size; b++) {
    scratch.block_best[b] = largest_of(logits + b * kBlock, least(kBlock, size - b * kBlock));
    if (scratch.block_best[b] > scratch.block_best[best_block]) best_block = b;
  }
  double temperature = call.temperatures[r], best = (double)scratch.block_best[best_block];
  if (!(temperature > 0)) return first_of(logits, best_block * kBlock, size, scratch.block_best[best_block]);
  Row<T> row = {logits, size, best, 1 / temperature, 0, scratch};
  row.lowest = Row<T>::most_of(best + kNothing * temperature, row.floor_of(temperature, call.min_p[r], call.top_k[r]));
  return call.top_p[r] < 1 ? row.draw_from_nucleus(call.uniforms[r], call.top_p[r]) : row.draw(call.uniforms[r]);
}

template <class T>
bool filters(const Sampling& call, i64 r) {
  return call.temperatures[r] > 0 && (call.top_p[r] < 1 || (call.top_k[r] > 0 && call.top_k[r] < call.vocabulary));
}

template <class T>
void sample_rows(const Sampling& call) {
  i64 padded = round_up(call.vocabulary, kBlock), blocks = padded / kBlock;
  parallel(call.rows, most(1, (1 << 15) / call.vocabulary), [&](i64 begin, i64 end) {
    bool filtered = false;
    for (i64 r = begin; r < end; r++) filtered |= filters<T>(call, r);
    size_t each = 2 * sizeof(double) + sizeof(int32_t);
    char* memory = (char*)malloc((size_t)blocks * 2 * sizeof(double) + (filtered ? (size_t)padded * each : 0));
    double* sums = (double*)memory;
    Scratch<T> scratch = {(T*)(sums + blocks), sums, sums + 2 * blocks, sums + 2 * blocks + padded,
                          (int32_t*)(sums + 2 * blocks + 2 * padded)};
    for (i64 r = begin; r < end; r++) call.chosen[r] = memory ? choose<T>(call, r, scratch) : -1;
    free(memory);
  });
}

template <class T>
T best_of(const T* logits, i64 size) {
  T best = -(T)__builtin_inf();
  for (i64 i = 0; i < size; i += kBlock) {
    T highest = largest_of(logits + i, least(kBlock, size - i));
    best = highest > best ? highest : best;
  }
  return best;
}

// log(sum(exp(logit - best))).
template <class T>
double log_total(const T* logits, i64 size, double best) {
  Row<T> row = {logits, size, best, 1, best + kNothing, {}};
  double total = 0;
  for (i64 i = 0; i < size; i += kBlock) total += row.weigh_block(i);
  return __builtin_log(total);
}

// The `count` best tokens and their logits, ties in order of token id. `totals`: the best logit and `log_total`.
template <class T>
void rank_row(const T* logits, i64 size, i64 count, i64* indices, double* values, double* totals) {
  totals[0] = (double)best_of(logits, size);
  totals[1] = log_total(logits, size, totals[0]);
  i64 held = 0;
  for (i64 i = 0; i < size; i++) {
    bool full = i % kBlock == 0 && held == count;
    if (full && !(held && (double)largest_of(logits + i, least(kBlock, size - i)) > values[held - 1])) {
      i += kBlock - 1;
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
