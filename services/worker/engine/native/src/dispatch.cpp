// Chooses the kernels for the processor, and exports them.
#include "abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const Table ballast_table_generic;
#if defined(__x86_64__)
extern "C" const Table ballast_table_avx2;
extern "C" const Table ballast_table_avx512;
extern "C" const Table ballast_table_avx512_bf16;
#endif

// The kernels for the best instruction set of this processor after skipping the `skip` best; null if there are no more.
static const Table* supported(int skip) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && skip-- == 0) return &ballast_table_avx512_bf16;
  if (avx512 && skip-- == 0) return &ballast_table_avx512;
  if (avx2 && skip-- == 0) return &ballast_table_avx2;
#endif
  return skip == 0 ? &ballast_table_generic : nullptr;
}

static const Table* chosen = nullptr;

static const Table& table() {
  if (!chosen) chosen = supported(0);
  return *chosen;
}

EXPORT i64 ballast_abi() { return BALLAST_ABI; }

// The name of the best instruction set after skipping the `skip` best; null if there are no more.
EXPORT const char* ballast_isa(i64 skip) {
  const Table* one = supported((int)skip);
  return one ? one->name : nullptr;
}

// Selects an instruction set for the whole process; no kernel may be running.
EXPORT void ballast_choose_isa(i64 skip) { chosen = supported((int)skip); }

EXPORT const char* ballast_chosen_isa() { return table().name; }

EXPORT void ballast_gemm(const Gemm* call) { table().gemm(call); }

EXPORT void ballast_grouped(const Grouped* call) { table().grouped(call); }

EXPORT void ballast_experts(const GatedExperts* call) { table().experts(call); }

EXPORT void ballast_rotate(const Rotation* call) { table().rotate(call); }

EXPORT void ballast_norm(i64 dtype, const void* x, i64 x_stride, const void* weight, void* out, i64 rows, i64 width, double eps) {
  table().norm(dtype, x, x_stride, weight, out, rows, width, eps);
}

EXPORT void ballast_write_kv(i64 dtype, i64 kv_dtype, void* kv, const void* k, const void* v, i64 stride,
                             const i64* slots, i64 rows, i64 row_elements, i64 block_tokens) {
  table().write_kv(dtype, kv_dtype, kv, k, v, stride, slots, rows, row_elements, block_tokens);
}

EXPORT void ballast_attend(const Attention* call) { table().attend(call); }

EXPORT void ballast_run_layers(const Model* model, const Step* step, i64 first, i64 last) {
  table().run_layers(model, step, first, last);
}

EXPORT void ballast_pack(i64 dtype, void* packed, i64 first_row, const void* rows, i64 row_count, i64 inputs) {
  table().pack(dtype, packed, first_row, rows, row_count, inputs);
}

EXPORT void ballast_sample(const Sampling* call) { table().sample(call); }

EXPORT void ballast_rank(i64 dtype, const void* logits, i64 size, i64 count, i64* indices, double* values, double* totals) {
  table().rank(dtype, logits, size, count, indices, values, totals);
}

EXPORT void ballast_unpack(i64 dtype, const void* packed, const i64* chosen_rows, i64 count, i64 inputs, void* out) {
  table().unpack_rows(dtype, packed, chosen_rows, count, inputs, out);
}
