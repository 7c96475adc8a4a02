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

template <class Size>
const float* as_float(const float* term, Size /*n*/, float* /*room*/) {
  return term;
}
template <class Size>
const float* as_float(const BF16* term, Size n, float* room) {
  for (int64_t i = 0; i < n; ++i) room[i] = cpu::load(term[i]);
  return room;
}

// Sums of n <= kBlock elements of the rows that begin at `terms` and are `stride` apart. Terms of f32 are read where
// they lie.
template <class Size, class In, class Out>
void sum_block(const SumProgram& program, const In* terms, int64_t stride, Size n, Out* out) {
  float sums[SumProgram::kMaxDepth][kBlock];
  const float* stack[SumProgram::kMaxDepth];
  int depth = 0;
  for (int t = 0; t < program.terms; ++t) {
    const auto term = static_cast<size_t>(t);
    stack[depth] = as_float(terms + program.rows[term] * stride, n, sums[depth]);
    ++depth;
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
  if (terms.dims() == 2 && out.dims() == 1) {
    return tree_sum(stream, program, terms.view({1, terms.dim(0), terms.dim(1)}), out.view({1, out.dim(0)}));
  }
  expect_float(kOp, "out", out, 2);
  expect_float(kOp, "terms", terms, 3);
  const int64_t rows = terms.dim(1), n = terms.dim(2);
  expect(kOp, "out", out, out.dtype(), {terms.dim(0), n});
  const int depth = checked_depth(program, rows);
  if (!has_work(kOp, stream, {&terms, &out})) return;
  if (on_cuda(stream)) return cuda::tree_sum(stream, program, depth, terms, out);
  visit_float(kOp, terms.dtype(), [&]<class In>(std::type_identity<In>) {
    visit_float(kOp, out.dtype(), [&]<class Out>(std::type_identity<Out>) {
      const auto sum_columns = [&](int64_t t, Range columns) {
        const auto* from = terms.data<In>() + t * rows * n;
        auto* to = out.data<Out>() + t * n;
        int64_t i = columns.begin;
        for (; i + kBlock <= columns.end; i += kBlock) sum_block(program, from + i, n, WholeBlock(), to + i);
        if (i < columns.end) sum_block(program, from + i, n, columns.end - i, to + i);
      };
      if (terms.dim(0) == 1) {
        cpu::parallel_for(stream.threads(), n, program.terms, [&](Range columns) { sum_columns(0, columns); });
      } else {
        cpu::parallel_for(stream.threads(), terms.dim(0), n * program.terms, [&](Range range) {
          for (int64_t t = range.begin; t < range.end; ++t) sum_columns(t, {0, n});
        });
      }
    });
  });
}

}  // namespace invar::ops
