#include "ops/matmul.h"

#include "core/error.h"
#include "ops/cpu/gemm.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"
#include "ops/proofs.h"

namespace invar::ops {
namespace {

std::string describe(const Tensor& a, bool transposed, Range columns) {
  if (columns != Range{0, a.dim(1)}) return format("{}, columns {} to {}", a.describe(), columns.begin, columns.end);
  return format("{}{}", a.describe(), transposed ? " transposed" : "");
}

// Of the columns of a as stored only `columns` are there.
void multiply(std::string_view op, const Stream& stream, const Tensor& a, Range columns, bool ta, const Tensor& b,
              bool tb, const Tensor& c, float beta, const Numerics& numerics) {
  const int64_t m = ta ? columns.size() : a.dim(0);
  const int64_t n = b.dim(tb ? 0 : 1);
  const int64_t k = ta ? a.dim(0) : columns.size();
  const bool shapes_fit = b.dim(tb ? 1 : 0) == k && c.dim(0) == m && c.dim(1) == n;
  INVAR_CHECK(shapes_fit, "{}: shapes do not fit: a is {}, b is {}{}, c is {}", op, describe(a, ta, columns),
              b.describe(), tb ? " transposed" : "", c.describe());
  INVAR_CHECK(a.dtype() == b.dtype(), "{}: a is {}, but b is {}", op, name_of(a.dtype()), name_of(b.dtype()));
  const bool beta_fits = beta == 0.0f || (beta == 1.0f && c.dtype() == DType::kF32);
  INVAR_CHECK(beta_fits, "{}: beta is {} and c {}; beta is 0, or 1 with c f32", op, beta, name_of(c.dtype()));
  if (a.dtype() == DType::kBF16) {
    numerics.note_proof(product_proof_bytes(a.bytes(), b.bytes(), beta == 1.0f ? c.bytes() : 0));
  }
  if (!has_work(op, stream, {&a, &b, &c})) return;
  if (on_cuda(stream)) return cuda::matmul(stream, a, columns, Transpose{ta}, b, Transpose{tb}, c, beta, numerics);

  visit_float(op, a.dtype(), [&]<class In>(std::type_identity<In>) {
    visit_float(op, c.dtype(), [&]<class Out>(std::type_identity<Out>) {
      cpu::gemm(m, n, k, a.data<In>() + columns.begin, a.dim(1), ta, b.data<In>(), tb, c.data<Out>(), beta == 1.0f,
                stream.threads());
    });
  });
}

void expect_matrices(std::string_view op, const Tensor& a, const Tensor& b, const Tensor& c) {
  expect_float(op, "a", a, 2);
  expect_float(op, "b", b, 2);
  expect_float(op, "c", c, 2);
}

// Returns how many sums the steps leave.
int64_t expect_leaves(std::string_view op, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps,
                      const LeafSpace& space) {
  expect_float(op, "a", a, 2);
  expect(op, "b", b, a.dtype(), {a.dim(1), b.dim(1)});
  INVAR_CHECK(!space.buffers.empty(), "{}: no buffer", op);
  for (const Tensor& buffer : space.buffers) {
    expect(op, "a buffer", buffer, space.buffers.front().dtype(), {a.dim(0), b.dim(1)});
  }
  if (space.rounded.defined()) expect(op, "rounded", space.rounded, DType::kBF16, {a.dim(0), b.dim(1)});
  int64_t sums = 0;  // on the stack, which each step adds to
  for (const LeafStep& step : steps) {
    const Range& columns = step.columns;
    INVAR_CHECK(0 <= columns.begin && columns.begin <= columns.end && columns.end <= a.dim(1),
                "{}: columns {} to {} of {}", op, columns.begin, columns.end, a.dim(1));
    const bool fits = step.buffer == sums - (step.accumulate ? 1 : 0) && step.buffer >= 0;
    if (!step.accumulate) ++sums;
    INVAR_CHECK(fits && sums <= std::ssize(space.buffers) && 0 <= step.joins && step.joins < sums,
                "{}: a step at buffer {} with {} joins, of {} sums", op, step.buffer, step.joins, sums);
    sums -= step.joins;
  }
  return sums;
}

}  // namespace

void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta, const Numerics& numerics) {
  expect_matrices("matmul", a, b, c);
  multiply("matmul", stream, a, {0, a.dim(1)}, transpose_a == Transpose::kYes, b, transpose_b == Transpose::kYes, c,
           beta, numerics);
}

void matmul_columns(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
                    const Tensor& c, float beta, const Numerics& numerics) {
  constexpr auto kOp = "matmul_columns";
  expect_matrices(kOp, a, b, c);
  const bool inside = 0 <= columns.begin && columns.begin <= columns.end && columns.end <= a.dim(1);
  INVAR_CHECK(inside, "{}: columns {} to {} of a {}", kOp, columns.begin, columns.end, a.describe());
  multiply(kOp, stream, a, columns, transpose_a == Transpose::kYes, b, false, c, beta, numerics);
}

void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms,
                    const Numerics& numerics) {
  constexpr auto kOp = "matmul_samples";
  expect_float(kOp, "a", a, 2);
  const bool inside = 0 <= columns.begin && columns.begin <= columns.end && columns.end <= a.dim(1);
  INVAR_CHECK(inside, "{}: columns {} to {} of a {}", kOp, columns.begin, columns.end, a.describe());
  expect(kOp, "b", b, a.dtype(), {a.dim(0), b.dim(1)});
  INVAR_CHECK(terms.dims() == 3 && terms.dim(0) > 0 && a.dim(0) % terms.dim(0) == 0,
              "{}: terms is {}, expected a matrix for each of the samples of {} tokens", kOp, terms.describe(),
              a.dim(0));
  expect(kOp, "terms", terms, DType::kF32, {terms.dim(0), columns.size(), b.dim(1)});
  const bool own_kernel = numerics.invariant && a.dtype() == DType::kF32;  // which takes one sample
  if (!own_kernel) numerics.note_proof(product_proof_bytes(a.bytes(), b.bytes(), 0));
  if (on_cuda(stream) && !own_kernel && terms.dim(0) > 1 && !terms.empty() && !a.empty()) {
    expect_on(kOp, stream, {&a, &b, &terms});
    return cuda::matmul_samples(stream, a, columns, b, terms, numerics);
  }
  const int64_t tokens = a.dim(0) / terms.dim(0);
  for (int64_t s = 0; s < terms.dim(0); ++s) {
    const auto part = [&](const Tensor& x) { return x.rows(s * tokens, (s + 1) * tokens); };
    multiply(kOp, stream, part(a), columns, true, part(b), false, terms.rows(s, s + 1).view({columns.size(), b.dim(1)}),
             0.0f, numerics);
  }
}

void matmul_leaf_by_leaf(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps,
                         const LeafSpace& space, const Numerics& numerics) {
  expect_leaves("matmul_leaf_by_leaf", a, b, steps, space);
  for (const LeafStep& step : steps) {
    const Tensor& sum = space.buffers[static_cast<size_t>(step.buffer)];
    const Tensor rows = b.rows(step.columns.begin, step.columns.end);
    if (!space.rounded.defined()) {
      matmul_columns(stream, a, step.columns, Transpose::kNo, rows, sum, step.accumulate ? 1.0f : 0.0f, numerics);
    } else {
      matmul_columns(stream, a, step.columns, Transpose::kNo, rows, space.rounded, 0.0f, numerics);
      step.accumulate ? add(stream, sum, space.rounded, sum) : copy(stream, space.rounded, sum);
    }
    for (int join = 0; join < step.joins; ++join) {
      const auto below = static_cast<size_t>(step.buffer - join - 1);
      add(stream, space.buffers[below], space.buffers[below + 1], space.buffers[below]);
    }
  }
}

void matmul_leaves(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps,
                   const LeafSpace& space, std::span<const Tensor> nodes, const Numerics& numerics) {
  constexpr auto kOp = "matmul_leaves";
  const int64_t sums = expect_leaves(kOp, a, b, steps, space);
  INVAR_CHECK(sums > 0 && sums == std::ssize(nodes), "{}: {} nodes for {} sums", kOp, nodes.size(), sums);
  for (const Tensor& node : nodes) expect(kOp, "a node", node, nodes.front().dtype(), {a.dim(0), b.dim(1)});
  if (a.dtype() == DType::kBF16 && steps.size() > 1) numerics.note_proof(kLeavesProofBytes);
  const DType leaf = space.rounded.defined() ? DType::kBF16 : space.buffers.front().dtype();
  if (on_cuda(stream) && has_work(kOp, stream, {&a, &b, &nodes.front()}) &&
      cuda::multiply_leaves(stream.cuda(), a, b, steps, leaf, nodes)) {
    return;
  }
  matmul_leaf_by_leaf(stream, a, b, steps, space, numerics);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].raw() != space.buffers[i].raw()) copy(stream, space.buffers[i], nodes[i]);
  }
}

}  // namespace invar::ops
