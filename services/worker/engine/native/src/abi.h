// The arguments that Python passes, and the functions compiled for each instruction set. Every field has 8 bytes;
// `structs.py` mirrors the structs.
//
// Shapes: T packed rows, D hidden size, N query heads, K KV heads, H head dim, I size inside the MLP, V vocabulary.
// Matrices are packed (see gemm.h) with their outputs padded to whole panels, and so are the biases.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int64_t i64;

#define BALLAST_ABI 5
#define BALLAST_PANEL 32  // outputs side by side in a packed matrix

enum Dtype : i64 { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFp8e4m3 = 3 };  // the last one: KV only

struct Layer {
  void* kv;  // [blocks, 2, block tokens, K, H]
  const void* attention_norm;
  const void* qkv;
  const void* qkv_bias;  // biases and norms of heads are null if the model has none
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

// Consecutive rows of one sequence, and the range of its tokens that they attend to.
struct Span {
  i64 first_row, row_count;
  i64 first_token;  // first visible token
  i64 end_token;    // one past the last token visible to the first row
  i64 grows;        // 1: every row sees one token more than the row before it
  i64 first_block;  // index in `blocks` where the sequence's table begins
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
  i64 add;   // 1: the product is added to `out`
  i64 wide;  // 1: `out` is float32 for bfloat16 inputs
};

struct Grouped {
  i64 dtype;
  const void* a;  // [rows, inputs], rows `a_stride` elements apart, sorted by group
  i64 a_stride;
  const void* matrices;  // [groups, outputs, inputs], not packed
  void* out;             // [rows, outputs]
  i64 outputs, inputs;
  const void* bias;  // [groups, outputs] or null
  i64 groups;
  const i64* ends;  // one past the last row of each group
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
  i64* chosen;             // output: the sampled token, or -1 if memory could not be allocated
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

// Calls `work` for all of [0, count) in parts of `grain`, on this thread and idle threads of the pool.
extern "C" __attribute__((visibility("hidden"))) void ballast_parallel(i64 count, i64 grain, Work work, void* context);
