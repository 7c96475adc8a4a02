#include "ops/embedding.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/sum_stack.h"
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

// Tokens by the row that they add to, ascending within a row; those that add to none are left out.
struct Lookups {
  std::vector<int64_t> positions;
  std::vector<int64_t> rows;  // of the positions
};
Lookups lookups_of(const Tensor& tokens, Range vocabulary, int64_t frozen_token) {
  const std::span<const int32_t> ids = tokens.span<int32_t>();
  Lookups lookups;
  for (int64_t t = 0; t < std::ssize(ids); ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    if (vocabulary.contains(id) && id != frozen_token) lookups.positions.push_back(t);
  }
  const auto row = [&](int64_t t) { return ids[static_cast<size_t>(t)] - vocabulary.begin; };
  std::ranges::stable_sort(lookups.positions, {}, row);
  for (const int64_t t : lookups.positions) lookups.rows.push_back(row(t));
  return lookups;
}

// A table cut by columns into blocks: element (row, c) of block j lies at j · stride + row · width + c of a buffer.
struct ColumnBlocks {
  int64_t blocks, stride, width;
};

template <class T>
void backward_cpu(int threads, const ColumnBlocks& table, float scale, const Lookups& lookups, const Tensor& d_out,
                  const SampleSums& sums) {
  constexpr int64_t kColumns = cpu::SumStack::kElements;
  const int64_t runs = ceil_div(table.width, kColumns), length = d_out.dim(0) / std::ssize(sums.places);
  cpu::parallel_for(threads, table.blocks * runs, d_out.dim(0) * std::min(table.width, kColumns), [&](Range range) {
    for (int64_t run = range.begin; run < range.end; ++run) {
      const int64_t block = run / runs, column = run % runs * kColumns;
      const int64_t n = std::min(kColumns, table.width - column);
      const T* terms = d_out.data<T>() + block * table.width + column;
      for (size_t i = 0; i < lookups.rows.size();) {
        const int64_t row = lookups.rows[i];
        cpu::SumStack stack(sums.buffers, block * table.stride + row * table.width + column, n);
        for (int64_t sample = 0; const SamplePlace& place : sums.places) {
          stack.begin(place);
          float* sum = stack.top();
          const int64_t end = ++sample * length;
          for (; i < lookups.rows.size() && lookups.rows[i] == row && lookups.positions[i] < end; ++i) {
            const T* term = terms + lookups.positions[i] * d_out.dim(1);
#pragma omp simd
            for (int64_t c = 0; c < n; ++c) sum[c] = std::fma(scale, load(term[c]), sum[c]);
          }
          stack.finish(place);
        }
        stack.store();
      }
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

// The rows of the table; every token is one of them.
void expect_column_table(std::string_view op, std::string_view name, const Tensor& table, DType dtype, int64_t block,
                         std::string_view out_name, const Tensor& out) {
  INVAR_CHECK(table.dims() == 2 && block > 0 && table.dim(1) % block == 0, "{}: {} {} is not rows of blocks of {}", op,
              name, table.describe(), block);
  expect(op, name, table, dtype, {table.dim(0), table.dim(1)});
  expect(op, out_name, out, out.dtype(), {out.dim(0), table.dim(0) * block});
}

void expect_backward(std::string_view op, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                     const SampleSums& sums) {
  expect_float(op, "d_out", d_out, 2);
  expect(op, "tokens", tokens, DType::kI32, {d_out.dim(0)});
  const int64_t samples = std::ssize(sums.places);
  check_sums(op, sums, samples);
  INVAR_CHECK(d_out.dim(0) % samples == 0, "{}: {} tokens of {} samples", op, d_out.dim(0), samples);
  const bool one_sum = samples == 1 && !sums.places.front().clears && sums.places.front().joins == 0;
  INVAR_CHECK(one_sum || params.scale >= 1, "{}: samples are scaled by {}, less than 1", op, params.scale);
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
                        Range vocabulary, const SampleSums& sums) {
  constexpr auto kOp = "embedding_backward";
  expect_backward(kOp, params, tokens, d_out, sums);
  for (const Tensor& d_table : sums.buffers) {
    expect(kOp, "d_table", d_table, DType::kF32, {vocabulary.size(), d_out.dim(1)});
    expect_on(kOp, stream, {&d_table});
  }
  if (!has_work(kOp, stream, {&tokens, &d_out, &sums.buffers.front()})) return;
  if (on_cuda(stream)) return cuda::embedding_backward(stream, params, tokens, d_out, vocabulary, sums);
  const Lookups lookups = lookups_of(tokens, vocabulary, params.frozen_token);
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward_cpu<T>(stream.threads(), {1, 0, d_out.dim(1)}, params.scale, lookups, d_out, sums);
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
                               const Tensor& d_out, int64_t block, const SampleSums& sums) {
  constexpr auto kOp = "column_embedding_backward";
  expect_backward(kOp, params, tokens, d_out, sums);
  const Tensor& d_table = sums.buffers.front();
  for (const Tensor& buffer : sums.buffers) {
    expect_column_table(kOp, "d_table", buffer, DType::kF32, block, "d_out", d_out);
    expect(kOp, "d_table", buffer, DType::kF32, {d_table.dim(0), d_table.dim(1)});
    expect_on(kOp, stream, {&buffer});
  }
  if (!has_work(kOp, stream, {&tokens, &d_out, &d_table})) return;
  if (on_cuda(stream)) return cuda::column_embedding_backward(stream, params, tokens, d_out, block, sums);
  const Lookups lookups = lookups_of(tokens, {0, d_table.dim(1) / block}, params.frozen_token);
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward_cpu<T>(stream.threads(), {d_table.dim(0), d_table.dim(1), block}, params.scale, lookups, d_out, sums);
  });
}

}  // namespace invar::ops
