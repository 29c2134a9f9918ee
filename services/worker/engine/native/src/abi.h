// What Python passes and what each instruction set offers. Every field has 8 bytes; `structs.py` mirrors it.
//
// Shapes: T packed rows, D hidden size, N query heads, K KV heads, H head dim, I size inside the MLP, V vocabulary.
// Matrices are packed (see gemm.h) with their outputs padded to whole panels, and so are the biases.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int64_t i64;

#define BALLAST_ABI 5
#define BALLAST_PANEL 32  // outputs side by side in a packed matrix

enum Dtype : i64 { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFp8e4m3 = 3 };  // the last one: only of KV

struct Layer {
  void* kv;  // [blocks, 2, block tokens, K, H]
  const void* attention_norm;
  const void* qkv;
  const void* qkv_bias;  // biases and the norms of heads: null if the model has none
  const void* query_norm;
  const void* key_norm;
  const void* output;
  const void* output_bias;
  const void* mlp_norm;
  const void* gate_up;
  const void* gate_up_bias;
  const void* down;
  const void* down_bias;
};

struct Model {
  i64 dtype, kv_dtype, hidden, heads, kv_heads, head_dim, inner, block_tokens;
  double eps;
  const void* rotary;  // [positions, 2, H]: cosines, and sines whose first half is negated
  const Layer* layers;
};

// Consecutive rows of one sequence, and which of its tokens they see.
struct Span {
  i64 first_row, row_count;
  i64 first_token;  // of those that are seen
  i64 end_token;    // of those that the first row sees
  i64 grows;        // 1: every row sees one token more than the row before it
  i64 first_block;  // in `blocks`: of the sequence's table, from its first token on
};

struct Spans {
  i64 count;
  const Span* spans;
  const i64* blocks;
};

struct Step {
  i64 rows;
  void* hidden;  // [T, D], changed in place
  const i64* positions;
  const i64* slots;  // block * block tokens + offset: where each row's K and V go
  Spans spans;
  void* normed;    // [T, D]
  void* qkv;       // [T, (N + 2K) * H]
  void* attended;  // [T, N * H]
  void* gate_up;   // [T, 2I]
};

struct Attention {
  i64 dtype, kv_dtype, heads, kv_heads, head_dim, block_tokens;
  const void* kv;
  const void* q;  // rows `q_stride` elements apart
  i64 q_stride;
  void* out;  // [rows, N * H], rows `out_stride` elements apart
  i64 out_stride;
  Spans spans;
};

struct Gemm {
  i64 dtype;
  const void* a;  // [rows, inputs], rows `a_stride` elements apart
  i64 a_stride;
  const void* packed;
  void* out;  // [rows, outputs], rows `out_stride` apart
  i64 out_stride, rows, outputs, inputs;
  const void* bias;
  i64 add;   // 1: to what is in `out`
  i64 wide;  // 1: bfloat16 products come out as float32
};

struct Grouped {
  i64 dtype;
  const void* a;  // [rows, inputs], rows `a_stride` elements apart, those of a group side by side
  i64 a_stride;
  const void* matrices;  // [groups, outputs, inputs], not packed
  void* out;             // [rows, outputs]
  i64 outputs, inputs;
  const void* bias;  // [groups, outputs] or null
  i64 groups;
  const i64* ends;  // of each group: behind its last row
};

struct Sampling {
  i64 dtype;           // of the logits: float32 or float64
  const void* logits;  // [rows, V], rows `stride` elements apart
  i64 stride, rows, vocabulary;
  const double* temperatures;  // [rows], as are the others; 0: the most probable token
  const i64* top_k;            // 0: all
  const double* top_p;
  const double* min_p;
  const double* uniforms;  // in [0, 1)
  i64* chosen;             // -1: there was no memory to draw with
};

struct Table {
  const char* name;
  void (*gemm)(const Gemm*);
  void (*grouped)(const Grouped*);
  void (*norm)(i64 dtype, const void* x, i64 x_stride, const void* weight, void* out, i64 rows, i64 width, double eps);
  void (*write_kv)(i64 dtype, i64 kv_dtype, void* kv, const void* k, const void* v, i64 stride, const i64* slots,
                   i64 rows, i64 row_elements, i64 block_tokens);
  void (*attend)(const Attention*);
  void (*run_layers)(const Model*, const Step*, i64 first, i64 last);
  void (*pack)(i64 dtype, void* packed, i64 first_row, const void* rows, i64 row_count, i64 inputs);
  void (*sample)(const Sampling*);
  void (*rank)(i64 dtype, const void* logits, i64 size, i64 count, i64* indices, double* values, double* totals);
  void (*unpack_rows)(i64 dtype, const void* packed, const i64* chosen, i64 count, i64 inputs, void* out);
};

typedef void (*Work)(void* context, i64 begin, i64 end);

// Calls `work` for all of [0, count) in parts of `grain`, on this thread and on those that are free.
extern "C" __attribute__((visibility("hidden"))) void ballast_parallel(i64 count, i64 grain, Work work, void* context);
