#include "ops/tree_sum.h"

#include <algorithm>
#include <type_traits>

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

// Elements summed at a time: so few that all terms are read side by side, each a few cache lines ahead of the next.
constexpr int64_t kBlock = 64;
using WholeBlock = std::integral_constant<int64_t, kBlock>;

// The most values on the program's stack.
int checked_depth(const SumProgram& program, int64_t rows) {
  int depth = 0;
  int most = 0;
  for (int t = 0; t < program.terms; ++t) {
    const auto term = static_cast<size_t>(t);
    INVAR_CHECK(program.rows[term] < rows, "tree_sum: term {} is row {} of {}", t, program.rows[term], rows);
    most = std::max(most, ++depth);
    depth -= program.joins[term];
    INVAR_CHECK(depth >= 1, "tree_sum: {} joins after term {} are more than there are values", program.joins[term], t);
  }
  INVAR_CHECK(depth == 1, "tree_sum: {} values remain of {} terms", depth, program.terms);
  INVAR_CHECK(most <= SumProgram::kMaxDepth, "tree_sum: {} values on the stack, at most {}", most,
              SumProgram::kMaxDepth);
  return most;
}

template <class Size, class Out>
void join(Size n, const float* a, const float* b, Out* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) cpu::store(out[i], a[i] + b[i]);
}

// Sums of n <= kBlock elements of the rows that begin at `terms` and are `stride` apart. Terms are read where they lie;
// only sums take room.
template <class Size, class Out>
void sum_block(const SumProgram& program, const float* terms, int64_t stride, Size n, Out* out) {
  float sums[SumProgram::kMaxDepth][kBlock];
  const float* stack[SumProgram::kMaxDepth];
  int depth = 0;
  for (int t = 0; t < program.terms; ++t) {
    const auto term = static_cast<size_t>(t);
    stack[depth++] = terms + program.rows[term] * stride;
    for (int joins = program.joins[term]; joins > 0; --joins) {
      --depth;
      if (t + 1 == program.terms && depth == 1) return join(n, stack[0], stack[1], out);
      join(n, stack[depth - 1], stack[depth], sums[depth - 1]);
      stack[depth - 1] = sums[depth - 1];
    }
  }
  if (static_cast<const void*>(stack[0]) == out) return;
  for (int64_t i = 0; i < n; ++i) cpu::store(out[i], stack[0][i]);  // a single term
}

}  // namespace

void SumProgram::add_term(int64_t row, int joins_after) {
  INVAR_CHECK(terms < kMaxTerms, "a sum of more than {} terms", kMaxTerms);
  INVAR_CHECK(0 <= row && row < kMaxTerms && 0 <= joins_after && joins_after < kMaxDepth, "row {}, {} joins", row,
              joins_after);
  rows[static_cast<size_t>(terms)] = static_cast<uint16_t>(row);
  joins[static_cast<size_t>(terms)] = static_cast<uint8_t>(joins_after);
  ++terms;
}

void tree_sum(const Stream& stream, const SumProgram& program, const Tensor& terms, const Tensor& out) {
  constexpr auto kOp = "tree_sum";
  expect_float(kOp, "out", out, 1);
  INVAR_CHECK(terms.dims() == 2, "{}: terms is {}, expected f32 of 2 dims", kOp, terms.describe());
  const int64_t n = out.dim(0);
  expect(kOp, "terms", terms, DType::kF32, {terms.dim(0), n});
  const int depth = checked_depth(program, terms.dim(0));
  if (!has_work(kOp, stream, {&terms, &out})) return;
  if (on_cuda(stream)) return cuda::tree_sum(stream, program, depth, terms, out);
  visit_float(kOp, out.dtype(), [&]<class Out>(std::type_identity<Out>) {
    const auto* from = terms.data<float>();
    auto* to = out.data<Out>();
    cpu::parallel_for(stream.threads(), n, program.terms, [&](Range range) {
      int64_t i = range.begin;
      for (; i + kBlock <= range.end; i += kBlock) sum_block(program, from + i, n, WholeBlock(), to + i);
      sum_block(program, from + i, n, range.end - i, to + i);
    });
  });
}

}  // namespace invar::ops
