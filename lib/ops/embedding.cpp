#include "ops/embedding.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::load;
using cpu::store;

template <class T>
void forward_cpu(int threads, int64_t count, int64_t width, float scale, const int32_t* tokens, const T* table,
                 Range vocabulary, T* out) {
  cpu::parallel_for(threads, count, width, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      T* y = out + t * width;
      if (!vocabulary.contains(tokens[t])) {
        std::fill(y, y + width, T{});
        continue;
      }
      const T* row = table + (tokens[t] - vocabulary.begin) * width;
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) store(y[c], load(row[c]) * scale + 0.0f);  // −0 + 0 = +0
    }
  });
}

template <class T>
void backward_cpu(int threads, int64_t count, int64_t width, LookupParams params, const int32_t* tokens, const T* d_out,
                  Range vocabulary, float* d_table) {
  cpu::parallel_columns(threads, width, count, [=](Range columns) {
    for (int64_t t = 0; t < count; ++t) {
      if (!vocabulary.contains(tokens[t]) || tokens[t] == params.frozen_token) continue;
      const T* dy = d_out + t * width;
      float* row = d_table + (tokens[t] - vocabulary.begin) * width;
#pragma omp simd
      for (int64_t c = columns.begin; c < columns.end; ++c) row[c] = std::fma(params.scale, load(dy[c]), row[c]);
    }
  });
}

// A block of columns is a table of its own, (V, block).
template <class T>
void column_forward_cpu(int threads, int64_t count, int64_t blocks, int64_t row_elements, int64_t block, float scale,
                        const int32_t* tokens, const T* table, T* out) {
  cpu::parallel_for(threads, count, blocks * block, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      T* y = out + t * blocks * block;
      const T* row = table + tokens[t] * block;
      for (int64_t j = 0; j < blocks; ++j) {
        for (int64_t c = 0; c < block; ++c) store(y[j * block + c], load(row[j * row_elements + c]) * scale + 0.0f);
      }
    }
  });
}

template <class T>
void column_backward_cpu(int threads, int64_t count, int64_t blocks, int64_t row_elements, int64_t block,
                         LookupParams params, const int32_t* tokens, const T* d_out, float* d_table) {
  cpu::parallel_for(threads, blocks, count * block, [=](Range mine) {
    for (int64_t t = 0; t < count; ++t) {
      if (tokens[t] == params.frozen_token) continue;
      const T* dy = d_out + t * blocks * block;
      float* row = d_table + tokens[t] * block;
      for (int64_t j = mine.begin; j < mine.end; ++j) {
        float* to = row + j * row_elements;
        for (int64_t c = 0; c < block; ++c) to[c] = std::fma(params.scale, load(dy[j * block + c]), to[c]);
      }
    }
  });
}

// The rows of the table; every token is one of them.
void expect_column_table(std::string_view op, std::string_view name, const Tensor& table, DType dtype, int64_t block,
                         std::string_view out_name, const Tensor& out) {
  INVAR_CHECK(table.dims() == 2 && block > 0 && table.dim(1) % block == 0, "{}: {} {} is not rows of blocks of {}", op,
              name, table.describe(), block);
  expect(op, name, table, dtype, {table.dim(0), table.dim(1)});
  expect(op, out_name, out, out.dtype(), {out.dim(0), table.dim(0) * block});
}

}  // namespace

void embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& table,
                       Range vocabulary, const Tensor& out) {
  constexpr auto kOp = "embedding_forward";
  expect_float(kOp, "out", out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {out.dim(0)});
  expect(kOp, "table", table, out.dtype(), {vocabulary.size(), out.dim(1)});
  if (!has_work(kOp, stream, {&tokens, &table, &out})) return;
  if (on_cuda(stream)) return cuda::embedding_forward(stream, params, tokens, table, vocabulary, out);
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    forward_cpu(stream.threads(), out.dim(0), out.dim(1), params.scale, tokens.data<int32_t>(), table.data<T>(),
                vocabulary, out.data<T>());
  });
}

void embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                        Range vocabulary, const Tensor& d_table) {
  constexpr auto kOp = "embedding_backward";
  expect_float(kOp, "d_out", d_out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {d_out.dim(0)});
  expect(kOp, "d_table", d_table, DType::kF32, {vocabulary.size(), d_out.dim(1)});
  if (!has_work(kOp, stream, {&tokens, &d_out, &d_table})) return;
  if (on_cuda(stream)) return cuda::embedding_backward(stream, params, tokens, d_out, vocabulary, d_table);
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward_cpu(stream.threads(), d_out.dim(0), d_out.dim(1), params, tokens.data<int32_t>(), d_out.data<T>(),
                 vocabulary, d_table.data<float>());
  });
}

void column_embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                              const Tensor& table, int64_t block, const Tensor& out) {
  constexpr auto kOp = "column_embedding_forward";
  expect_float(kOp, "out", out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {out.dim(0)});
  expect_column_table(kOp, "table", table, out.dtype(), block, "out", out);
  if (!has_work(kOp, stream, {&tokens, &table, &out})) return;
  if (on_cuda(stream)) return cuda::column_embedding_forward(stream, params, tokens, table, block, out);
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    column_forward_cpu(stream.threads(), out.dim(0), table.dim(0), table.dim(1), block, params.scale,
                       tokens.data<int32_t>(), table.data<T>(), out.data<T>());
  });
}

void column_embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                               const Tensor& d_out, int64_t block, const Tensor& d_table) {
  constexpr auto kOp = "column_embedding_backward";
  expect_float(kOp, "d_out", d_out, 2);
  expect(kOp, "tokens", tokens, DType::kI32, {d_out.dim(0)});
  expect_column_table(kOp, "d_table", d_table, DType::kF32, block, "d_out", d_out);
  if (!has_work(kOp, stream, {&tokens, &d_out, &d_table})) return;
  if (on_cuda(stream)) return cuda::column_embedding_backward(stream, params, tokens, d_out, block, d_table);
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    column_backward_cpu(stream.threads(), d_out.dim(0), d_table.dim(0), d_table.dim(1), block, params,
                        tokens.data<int32_t>(), d_out.data<T>(), d_table.data<float>());
  });
}

}  // namespace invar::ops
