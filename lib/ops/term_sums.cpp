#include "ops/term_sums.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/sum_stack.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

constexpr auto kOp = "add_term_sums";
constexpr auto kTermsOp = "add_terms";
constexpr int64_t kColumns = cpu::SumStack::kElements;

// out[i] = the sum of the rows' element i, in ascending order.
void sum_rows(std::span<const int64_t> rows, const float* terms, int64_t n, float* out) {
  std::copy_n(terms + rows.front(), n, out);
  for (const int64_t row : rows.subspan(1)) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] += terms[row + i];
  }
}

// n elements of a vector, which begin at `first` of the terms' rows and at `into` of the buffers.
void add_columns(const TermTable::Vector& vector, const int64_t* rows, const float* terms, int64_t into, int64_t n,
                 const SampleSums& sums) {
  float term[kColumns];
  cpu::SumStack stack(sums.buffers, into, n);
  for (const SamplePlace& place : sums.places) {
    sum_rows({rows, static_cast<size_t>(vector.rows_per_sample)}, terms, n, term);
    rows += vector.rows_per_sample;
    stack.add(place, term);
  }
  stack.store();
}

void check_operands(const TermTable& table, const Tensor& packed, const Tensor& terms, const SampleSums& sums) {
  expect(kOp, "packed", packed, DType::kI64, {table.packed_size()});
  INVAR_CHECK(terms.dims() == 1 && terms.dtype() == DType::kF32 && terms.dim(0) >= table.terms_end(),
              "{}: terms is {}, expected f32 of {} elements or more", kOp, terms.describe(), table.terms_end());
  check_sums(kOp, sums, table.samples());
  for (const Tensor& buffer : sums.buffers) {
    INVAR_CHECK(buffer.dims() == 1 && buffer.dtype() == DType::kF32 && buffer.dim(0) >= table.buffer_end(),
                "{}: a buffer is {}, expected f32 of {} elements or more", kOp, buffer.describe(), table.buffer_end());
  }
}

}  // namespace

void TermTable::add(int64_t width, int64_t into, std::span<const int64_t> rows) {
  INVAR_CHECK(samples_ > 0 && !rows.empty() && std::ssize(rows) % samples_ == 0, "{} rows of {} samples", rows.size(),
              samples_);
  INVAR_CHECK(width > 0 && into >= 0 && std::ranges::min(rows) >= 0, "{} elements at {}", width, into);
  vectors_.push_back({std::ssize(rows_), std::ssize(rows) / samples_, width, into});
  rows_.insert(rows_.end(), rows.begin(), rows.end());
  widest_ = std::max(widest_, width);
  terms_end_ = std::max(terms_end_, std::ranges::max(rows) + width);
  buffer_end_ = std::max(buffer_end_, into + width);
}

std::vector<int64_t> TermTable::packed() const {
  std::vector<int64_t> all;
  all.reserve(static_cast<size_t>(packed_size()));
  for (const Vector& v : vectors_) all.insert(all.end(), {v.first, v.rows_per_sample, v.width, v.into});
  all.insert(all.end(), rows_.begin(), rows_.end());
  return all;
}

void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   const SampleSums& sums) {
  check_operands(table, packed, terms, sums);
  for (const Tensor& buffer : sums.buffers) expect_on(kOp, stream, {&buffer});
  if (!has_work(kOp, stream, {&packed, &terms}) || table.vectors().empty()) return;
  if (on_cuda(stream)) return cuda::add_term_sums(stream, table, packed, terms, sums);
  const std::vector<TermTable::Vector>& vectors = table.vectors();
  const auto* rows = packed.data<int64_t>() + TermTable::kFields * std::ssize(vectors);
  const auto* from = terms.data<float>();
  cpu::parallel_for(stream.threads(), std::ssize(vectors), table.terms_end() / std::ssize(vectors), [&](Range range) {
    for (int64_t v = range.begin; v < range.end; ++v) {
      const TermTable::Vector& vector = vectors[static_cast<size_t>(v)];
      for (int64_t begin = 0; begin < vector.width; begin += kColumns) {
        const int64_t n = std::min(kColumns, vector.width - begin);
        add_columns(vector, rows + vector.first, from + begin, vector.into + begin, n, sums);
      }
    }
  });
}

void add_terms(const Stream& stream, const Tensor& terms, const SampleSums& sums) {
  INVAR_CHECK(terms.dims() > 0 && terms.dim(0) > 0 && terms.dtype() == DType::kF32, "{}: terms is {}", kTermsOp,
              terms.describe());
  check_sums(kTermsOp, sums, terms.dim(0));
  const int64_t n = terms.numel() / terms.dim(0);
  for (const Tensor& buffer : sums.buffers) {
    INVAR_CHECK(buffer.dtype() == DType::kF32 && buffer.numel() == n, "{}: a buffer is {}, a term of {} elements",
                kTermsOp, buffer.describe(), n);
    expect_on(kTermsOp, stream, {&buffer});
  }
  if (!has_work(kTermsOp, stream, {&terms}) || n == 0) return;
  if (on_cuda(stream)) return cuda::add_terms(stream, terms, sums);
  cpu::parallel_for(stream.threads(), ceil_div(n, kColumns), kColumns * terms.dim(0), [&](Range range) {
    for (int64_t run = range.begin; run < range.end; ++run) {
      const int64_t begin = run * kColumns;
      cpu::SumStack stack(sums.buffers, begin, std::min(kColumns, n - begin));
      const float* term = terms.data<float>() + begin;
      for (const SamplePlace& place : sums.places) {
        stack.add(place, term);
        term += n;
      }
      stack.store();
    }
  });
}

}  // namespace invar::ops
