// Attention over the paged KV cache: K and V are read in place, and only from slots that a query attends to.
//
// A task is one KV head and a few rows of one sequence. It walks the context in tiles of up to 16 tokens of a block and
// keeps a running maximum, sum and result per query. A query's result does not depend on the other rows, so a prompt
// gives the same bits for every chunk size, and token by token.
#pragma once
#include "vector.h"

namespace {

constexpr int kTileTokens = 16;
constexpr int kTaskQueries = 64;
constexpr size_t kScratchAlignBits = 64 * 8;

// acc[N vectors] = acc * shrink + weights x values, for the tokens [low, high) of a tile.
template <class C, int N>
INLINE void add_values(C* acc, C shrink, const C* weights, const C* values, i64 stride, i64 low, i64 high) {
  constexpr int lanes = Vec<C>::lanes;
  typename Vec<C>::v sum[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) sum[i] = load(acc + i * lanes) * shrink;
  for (i64 t = low; t < high; t++) {
    typename Vec<C>::v weight = splat(weights[t]);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) sum[i] = weight * load(values + t * stride + i * lanes) + sum[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) store(acc + i * lanes, sum[i]);
}

// Scaled scores of a query with a vector's tokens [low, high); the other lanes are 0.
template <class C>
INLINE typename Vec<C>::v scores_of(const C* q, const C* keys, i64 stride, i64 low, i64 high, i64 width, C scale) {
  typedef typename Vec<C>::v V;
  constexpr int lanes = Vec<C>::lanes;
  if (low == 0 && high == lanes) {
    V part[lanes];
#pragma GCC unroll 16
    for (int t = 0; t < lanes; t++) part[t] = V{};
    for (i64 d = 0; d < width; d += lanes) {
      V x = load(q + d);
#pragma GCC unroll 16
      for (int t = 0; t < lanes; t++) part[t] = x * load(keys + t * stride + d) + part[t];
    }
    return sums<C>(part) * scale;
  }
  V part[lanes];
  for (int t = 0; t < lanes; t++) {
    V sum = V{};
    if (t >= low && t < high)
      for (i64 d = 0; d < width; d += lanes) sum = load(q + d) * load(keys + t * stride + d) + sum;
    part[t] = sum;
  }
  return sums<C>(part) * scale;
}

// The running state of a task's queries.
template <class C>
struct Running {
  C* q;        // [queries, width]: padded with zeros
  C* acc;      // [queries, width]
  C* sum;      // [queries, lanes]: partial sums, added up at the end
  C* largest;  // [queries]
};

// Queries and results are of type T, keys and values of type S.
template <class T, class S>
struct AttendCall {
  typedef typename Type<T>::compute C;
  typedef typename Vec<C>::v V;
  static constexpr int lanes = Vec<C>::lanes;
  static constexpr bool kConverts = sizeof(S) != sizeof(C);

  const Attention& call;
  i64 group, width, task_rows;
  C scale;

  explicit AttendCall(const Attention& c) : call(c) {
    group = c.heads / c.kv_heads;
    width = round_up(c.head_dim, lanes);
    task_rows = most(1, kTaskQueries / group);
    scale = (C)(1 / __builtin_sqrt((double)c.head_dim));
  }

  void run() const {
    i64 count = call.spans.count, tasks = 0, tokens = 0;
    i64* ends = (i64*)__builtin_alloca((size_t)(count + 1) * sizeof(i64));
    for (i64 i = 0; i < count; i++) {
      const Span& span = call.spans.spans[i];
      tasks += (span.row_count + task_rows - 1) / task_rows;
      tokens += span.row_count * (span.end_token - span.first_token);
      ends[i] = tasks;
    }
    i64 total = tasks * call.kv_heads;
    i64 work = most(1, tokens * call.heads * call.head_dim / most(1, total));
    parallel(total, most(1, (1 << 19) / work), [&, ends](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) {
        i64 task = i / call.kv_heads, low = 0, high = count - 1;
        while (low < high) {
          i64 middle = (low + high) / 2;
          if (ends[middle] > task)
            high = middle;
          else
            low = middle + 1;
        }
        attend(call.spans.spans[low], task - (low ? ends[low - 1] : 0), i % call.kv_heads);
      }
    });
  }

  __attribute__((noinline)) void attend(const Span& span, i64 task, i64 kv_head) const {
    i64 first = task * task_rows, rows = least(task_rows, span.row_count - first), queries = rows * group;
    size_t size = (size_t)(queries * (2 * width + lanes + 1) + 2 * kTileTokens * width + lanes) * sizeof(C);
    C* at = (C*)__builtin_alloca_with_align(size, kScratchAlignBits);
    Running<C> running = {at, at + queries * width, at + 2 * queries * width, nullptr};
    running.largest = running.sum + queries * lanes;
    C* staged = running.sum + round_up(queries * (lanes + 1), lanes);
    begin(running, span, first, rows, kv_head);
    i64 last_end = span.end_token + (span.grows ? first + rows - 1 : 0);
    for (i64 token = span.first_token; token < last_end;) {
      i64 in_block = token % call.block_tokens, in_tile = in_block % kTileTokens;
      i64 block = call.spans.blocks[span.first_block + token / call.block_tokens];
      i64 tile_tokens = least(kTileTokens, call.block_tokens - (in_block - in_tile));
      i64 tile = token - in_tile, end = least(tile + tile_tokens, last_end);
      i64 slot = 2 * block * call.block_tokens + in_block - in_tile;
      const S* keys = (const S*)call.kv + (slot * call.kv_heads + kv_head) * call.head_dim;
      if (rows == 1 && end < last_end) fetch_behind(span, end, last_end, kv_head);
      attend_tile(running, span, first, rows, keys, staged, tile, token, end);
      token = end;
    }
    finish(running, span, first, rows, kv_head);
  }

  // Prefetches the keys and values of the tile that begins at `token`: blocks are scattered, so the hardware prefetcher
  // cannot predict them. For single rows, which are bound by memory.
  void fetch_behind(const Span& span, i64 token, i64 last_end, i64 kv_head) const {
    constexpr i64 line = 64 / sizeof(S);
    i64 in_block = token % call.block_tokens, stride = call.kv_heads * call.head_dim;
    i64 slot = 2 * call.spans.blocks[span.first_block + token / call.block_tokens] * call.block_tokens + in_block;
    const S* keys = (const S*)call.kv + slot * stride + kv_head * call.head_dim;
    i64 count = least(least(kTileTokens, call.block_tokens - in_block), last_end - token);
    for (i64 t = 0; t < count; t++, keys += stride)
      for (i64 d = 0; d < call.head_dim; d += line)
        __builtin_prefetch(keys + d), __builtin_prefetch(keys + call.block_tokens * stride + d);
  }

  template <class P>
  INLINE void copy(const P* from, C* to, i64 count, i64 size) {
    for (i64 d = 0; d < size; d += lanes) store(to + d, load_part(from + d, most(0, count - d)));
  }

  void begin(const Running<C>& running, const Span& span, i64 first, i64 rows, i64 kv_head) const {
    for (i64 r = 0; r < rows; r++) {
      const T* q = (const T*)call.q + (span.first_row + first + r) * call.q_stride + kv_head * group * call.head_dim;
      for (i64 g = 0; g < group; g++) {
        i64 i = r * group + g;
        copy(q + g * call.head_dim, running.q + i * width, call.head_dim, width);
        for (i64 d = 0; d < width; d += lanes) store(running.acc + i * width + d, V{});
        store(running.sum + i * lanes, V{});
        running.largest[i] = -(C)__builtin_inf();
      }
    }
  }

  // Attends to the tokens [token, end) of the tile that begins at `tile`; `keys` points to the tile's first key.
  void attend_tile(const Running<C>& running, const Span& span, i64 first, i64 rows, const S* keys, C* staged, i64 tile,
                   i64 token, i64 end) const {
    i64 stride = call.kv_heads * call.head_dim, to_values = call.block_tokens * stride;
    const C *k = (const C*)keys, *v = (const C*)(keys + to_values);
    i64 token_stride = stride;
    if (kConverts || width != call.head_dim) {
      k = staged, v = staged + kTileTokens * width, token_stride = width;
      for (i64 t = token - tile; t < end - tile; t++) {
        copy(keys + t * stride, staged + t * width, call.head_dim, width);
        copy(keys + to_values + t * stride, staged + (kTileTokens + t) * width, call.head_dim, width);
      }
    }
    for (i64 r = 0; r < rows; r++) {
      i64 seen = least(end, span.end_token + (span.grows ? first + r : 0));
      for (i64 g = 0; g < group && seen > token; g++)
        attend_query(running, r * group + g, k, v, token_stride, token - tile, seen - tile);
    }
  }

  INLINE void add_all(C* acc, C shrink, const C* weights, const C* v, i64 stride, i64 low, i64 high, i64 width) {
    i64 d = 0;
    for (; d + 8 * lanes <= width; d += 8 * lanes) add_values<C, 8>(acc + d, shrink, weights, v + d, stride, low, high);
    if (d + 4 * lanes <= width) add_values<C, 4>(acc + d, shrink, weights, v + d, stride, low, high), d += 4 * lanes;
    if (d + 2 * lanes <= width) add_values<C, 2>(acc + d, shrink, weights, v + d, stride, low, high), d += 2 * lanes;
    if (d + lanes <= width) add_values<C, 1>(acc + d, shrink, weights, v + d, stride, low, high);
  }

  void attend_query(const Running<C>& running, i64 i, const C* k, const C* v, i64 stride, i64 low, i64 high) const {
    constexpr int parts = kTileTokens / lanes;
    const typename Vec<C>::i numbers = lane_numbers<C>();
    typedef __typeof__(numbers[0] + 0) Lane;
    V score[parts];
    V best = splat(-(C)__builtin_inf());
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
      i64 from = most(low - p * lanes, 0), to = least(high - p * lanes, lanes);
      if (to <= from) {
        score[p] = splat(-(C)__builtin_inf());
        continue;
      }
      V all = scores_of<C>(running.q + i * width, k + p * lanes * stride, stride, from, to, width, scale);
      score[p] = ((numbers >= (Lane)from) & (numbers < (Lane)to)) ? all : splat(-(C)__builtin_inf());
      best = best > score[p] ? best : score[p];
    }
    C highest = max_of<C>(best), before = running.largest[i], shrink = 1;
    if (highest > before) {
      shrink = exponential(splat(before - highest))[0];
      running.largest[i] = before = highest;
    }
    alignas(64) C weights[kTileTokens];
    V sum = load(running.sum + i * lanes) * shrink;
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
      V weight = exponential(score[p] - before);
      weight = score[p] == -(C)__builtin_inf() ? V{} : weight;
      store(weights + p * lanes, weight);
      sum += weight;
    }
    store(running.sum + i * lanes, sum);
    add_all(running.acc + i * width, shrink, weights, v, stride, low, high, width);
  }

  void finish(const Running<C>& running, const Span& span, i64 first, i64 rows, i64 kv_head) const {
    for (i64 r = 0; r < rows; r++)
      for (i64 g = 0; g < group; g++) {
        i64 i = r * group + g, row = span.first_row + first + r, head = kv_head * group + g;
        C share = 1 / sum_of<C>(load(running.sum + i * lanes));
        T* out = (T*)call.out + row * call.out_stride + head * call.head_dim;
        for (i64 d = 0; d < call.head_dim; d += lanes)
          store_part(out + d, load(running.acc + i * width + d) * share, call.head_dim - d);
      }
  }
};

template <class T>
void attend_all(const Attention& call) {
  typedef fp8<typename Type<T>::compute> F8;
  if (call.kv_dtype == kFp8e4m3)
    AttendCall<T, F8>(call).run();
  else
    AttendCall<T, T>(call).run();
}

}  // namespace
