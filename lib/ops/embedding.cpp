#include "ops/embedding.h"

#include <algorithm>

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::load;
using cpu::store;

template <class T>
void forward_cpu(int threads, int64_t count, int64_t width, const int32_t* tokens, const T* table, Range vocabulary,
                 T* out) {
  cpu::parallel_for(threads, count, width, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      T* y = out + t * width;
      if (!vocabulary.contains(tokens[t])) {
        std::fill(y, y + width, T{});
        continue;
      }
      const T* row = table + (tokens[t] - vocabulary.begin) * width;
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) store(y[c], load(row[c]) + 0.0f);  // −0 + 0 = +0
    }
  });
}

template <class T>
void backward_cpu(int threads, int64_t count, int64_t width, const int32_t* tokens, const T* d_out, Range vocabulary,
                  float* d_table) {
  cpu::parallel_columns(threads, width, count, [=](Range columns) {
    for (int64_t t = 0; t < count; ++t) {
      if (!vocabulary.contains(tokens[t])) continue;
      const T* dy = d_out + t * width;
      float* row = d_table + (tokens[t] - vocabulary.begin) * width;
#pragma omp simd
      for (int64_t c = columns.begin; c < columns.end; ++c) row[c] += load(dy[c]);
    }
  });
}

}  // namespace

void embedding_forward(const Stream& stream, const Tensor& tokens, const Tensor& table, Range vocabulary,
                       const Tensor& out) {
  constexpr auto kOp = "embedding_forward";
  expect_float(kOp, "out", out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {out.dim(0)});
  expect(kOp, "table", table, out.dtype(), {vocabulary.size(), out.dim(1)});
  if (!runs_on_cpu(kOp, stream, {&tokens, &table, &out})) return;
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    forward_cpu(stream.threads(), out.dim(0), out.dim(1), tokens.data<int32_t>(), table.data<T>(), vocabulary,
                out.data<T>());
  });
}

void embedding_backward(const Stream& stream, const Tensor& tokens, const Tensor& d_out, Range vocabulary,
                        const Tensor& d_table) {
  constexpr auto kOp = "embedding_backward";
  expect_float(kOp, "d_out", d_out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {d_out.dim(0)});
  expect(kOp, "d_table", d_table, DType::kF32, {vocabulary.size(), d_out.dim(1)});
  if (!runs_on_cpu(kOp, stream, {&tokens, &d_out, &d_table})) return;
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward_cpu(stream.threads(), d_out.dim(0), d_out.dim(1), tokens.data<int32_t>(), d_out.data<T>(), vocabulary,
                 d_table.data<float>());
  });
}

}  // namespace invar::ops
