// The kernels for one instruction set: compiled once for each, with ISA naming it and VECTOR_BYTES its width.
#include "experts.h"
#include "sampler.h"

namespace {

// Calls `body` with a null pointer whose type is that of `dtype`.
template <class F>
INLINE void with_type(i64 dtype, const F& body) {
  switch (dtype) {
    case kFloat32:
      return body((float*)nullptr);
    case kFloat64:
      return body((double*)nullptr);
    default:
      return body((bf16*)nullptr);
  }
}

#define STORED(pointer) __typeof__(*pointer)

void gemm(const Gemm* g) {
  with_type(g->dtype, [&](auto* p) {
    typedef STORED(p) T;
    typedef typename Type<T>::compute C;
    if (g->wide)
      multiply<T, C>((const T*)g->a, g->a_stride, g->packed, (C*)g->out, g->out_stride, g->rows, g->outputs, g->inputs, g->bias, g->add);
    else
      multiply<T, T>((const T*)g->a, g->a_stride, g->packed, (T*)g->out, g->out_stride, g->rows, g->outputs, g->inputs, g->bias, g->add);
  });
}

void grouped(const Grouped* p) {
  with_type(p->dtype, [&](auto* t) { GroupedCall<STORED(t)>{*p}.run(); });
}

void experts(const GatedExperts* p) {
  with_type(p->dtype, [&](auto* t) { ExpertsCall<STORED(t)>{*p}.run(); });
}

void rotate_heads(const Rotation* p) {
  with_type(p->dtype, [&](auto* t) { rotate_all<STORED(t)>(*p); });
}

void norm(i64 dtype, const void* x, i64 x_stride, const void* weight, void* out, i64 rows, i64 width, double eps) {
  with_type(dtype, [&](auto* p) {
    typedef STORED(p) T;
    norm_rows((const T*)x, x_stride, (const T*)weight, (T*)out, rows, width, (float)eps);
  });
}

void write_kv(i64 dtype, i64 kv_dtype, void* kv, const void* k, const void* v, i64 stride, const i64* slots, i64 rows,
              i64 row_elements, i64 block_tokens) {
  with_type(dtype, [&](auto* p) {
    typedef STORED(p) T;
    write_all(kv_dtype, kv, (const T*)k, (const T*)v, stride, slots, rows, row_elements, block_tokens);
  });
}

void attend(const Attention* call) {
  with_type(call->dtype, [&](auto* p) { attend_all<STORED(p)>(*call); });
}

void run_layers(const Model* m, const Step* s, i64 first, i64 last) {
  with_type(m->dtype, [&](auto* p) {
    for (i64 i = first; i < last; i++) {
      LayerCall<STORED(p)> call{*m, *s, m->layers[i]};
      call.before();
      call.attend();
      call.after();
    }
  });
}

void pack(i64 dtype, void* packed, i64 first_row, const void* rows, i64 row_count, i64 inputs) {
  with_type(dtype, [&](auto* p) {
    typedef STORED(p) T;
    pack_rows((T*)packed, first_row, (const T*)rows, row_count, inputs);
  });
}

void sample(const Sampling* call) {
  if (call->dtype == kFloat64)
    sample_rows<double>(*call);
  else
    sample_rows<float>(*call);
}

void rank(i64 dtype, const void* logits, i64 size, i64 count, i64* indices, double* values, double* totals) {
  if (dtype == kFloat64)
    rank_row((const double*)logits, size, count, indices, values, totals);
  else
    rank_row((const float*)logits, size, count, indices, values, totals);
}

void unpack(i64 dtype, const void* packed, const i64* chosen, i64 count, i64 inputs, void* out) {
  with_type(dtype, [&](auto* p) {
    typedef STORED(p) T;
    unpack_rows((const T*)packed, chosen, count, inputs, (T*)out);
  });
}

}  // namespace

#define TABLE_(name) ballast_table_##name
#define TABLE(name) TABLE_(name)
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

extern "C" __attribute__((visibility("hidden"))) const Table TABLE(ISA);
extern "C" const Table TABLE(ISA) = {TEXT(ISA), gemm, grouped, experts, rotate_heads, norm, write_kv, attend, run_layers, pack, sample, rank, unpack};
