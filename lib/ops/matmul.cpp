#include "ops/matmul.h"

#include "core/error.h"
#include "ops/cpu/gemm.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"
#include "ops/proofs.h"

namespace invar::ops {
namespace {

std::string describe(const Tensor& a, bool transposed, Range columns) {
  if (columns != Range{0, a.dim(1)}) return format("{}, columns {} to {}", a.describe(), columns.begin, columns.end);
  return format("{}{}", a.describe(), transposed ? " transposed" : "");
}

// Of the columns of a as stored only `columns` are there.
void multiply(std::string_view op, const Stream& stream, const Tensor& a, Range columns, bool ta, const Tensor& b,
              bool tb, const Tensor& c, float beta) {
  const int64_t m = ta ? columns.size() : a.dim(0);
  const int64_t n = b.dim(tb ? 0 : 1);
  const int64_t k = ta ? a.dim(0) : columns.size();
  const bool shapes_fit = b.dim(tb ? 1 : 0) == k && c.dim(0) == m && c.dim(1) == n;
  INVAR_CHECK(shapes_fit, "{}: shapes do not fit: a is {}, b is {}{}, c is {}", op, describe(a, ta, columns),
              b.describe(), tb ? " transposed" : "", c.describe());
  INVAR_CHECK(a.dtype() == b.dtype(), "{}: a is {}, but b is {}", op, name_of(a.dtype()), name_of(b.dtype()));
  const bool beta_fits = beta == 0.0f || (beta == 1.0f && c.dtype() == DType::kF32);
  INVAR_CHECK(beta_fits, "{}: beta is {} and c {}; beta is 0, or 1 with c f32", op, beta, name_of(c.dtype()));
  if (stream.invariant() && a.dtype() == DType::kBF16) {
    stream.note_momentary(product_proof_bytes(a.bytes(), b.bytes(), beta == 1.0f ? c.bytes() : 0));
  }
  if (!has_work(op, stream, {&a, &b, &c})) return;
  if (on_cuda(stream)) return cuda::matmul(stream, a, columns, Transpose{ta}, b, Transpose{tb}, c, beta);

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

// The stack of sums holds what each step adds to it, and in the end the nodes.
void expect_steps(std::string_view op, std::span<const LeafStep> steps, int64_t k, int64_t nodes) {
  int64_t sums = 0;
  for (const LeafStep& step : steps) {
    const Range& columns = step.columns;
    INVAR_CHECK(0 <= columns.begin && columns.begin <= columns.end && columns.end <= k, "{}: columns {} to {} of {}",
                op, columns.begin, columns.end, k);
    const bool fits = step.buffer == sums - (step.accumulate ? 1 : 0) && step.buffer >= 0;
    if (!step.accumulate) ++sums;
    INVAR_CHECK(fits && 0 <= step.joins && step.joins < sums, "{}: a step at buffer {} with {} joins, of {} sums", op,
                step.buffer, step.joins, sums);
    sums -= step.joins;
  }
  INVAR_CHECK(sums == nodes, "{}: {} nodes for {} sums", op, nodes, sums);
}

}  // namespace

void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta) {
  expect_matrices("matmul", a, b, c);
  multiply("matmul", stream, a, {0, a.dim(1)}, transpose_a == Transpose::kYes, b, transpose_b == Transpose::kYes, c,
           beta);
}

void matmul_columns(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
                    const Tensor& c, float beta) {
  constexpr auto kOp = "matmul_columns";
  expect_matrices(kOp, a, b, c);
  const bool inside = 0 <= columns.begin && columns.begin <= columns.end && columns.end <= a.dim(1);
  INVAR_CHECK(inside, "{}: columns {} to {} of a {}", kOp, columns.begin, columns.end, a.describe());
  multiply(kOp, stream, a, columns, transpose_a == Transpose::kYes, b, false, c, beta);
}

void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms) {
  constexpr auto kOp = "matmul_samples";
  expect_float(kOp, "a", a, 2);
  const bool inside = 0 <= columns.begin && columns.begin <= columns.end && columns.end <= a.dim(1);
  INVAR_CHECK(inside, "{}: columns {} to {} of a {}", kOp, columns.begin, columns.end, a.describe());
  expect(kOp, "b", b, a.dtype(), {a.dim(0), b.dim(1)});
  INVAR_CHECK(terms.dims() == 3 && terms.dim(0) > 0 && a.dim(0) % terms.dim(0) == 0,
              "{}: terms is {}, expected a matrix for each of the samples of {} tokens", kOp, terms.describe(),
              a.dim(0));
  expect(kOp, "terms", terms, DType::kF32, {terms.dim(0), columns.size(), b.dim(1)});
  const bool in_order = stream.invariant() && a.dtype() == DType::kF32;  // by a kernel of our own
  if (stream.invariant() && !in_order) stream.note_momentary(product_proof_bytes(a.bytes(), b.bytes(), 0));
  if (on_cuda(stream) && !in_order && terms.dim(0) > 1 && !terms.empty() && !a.empty()) {
    expect_on(kOp, stream, {&a, &b, &terms});
    return cuda::matmul_samples(stream, a, columns, b, terms);
  }
  const int64_t tokens = a.dim(0) / terms.dim(0);
  for (int64_t s = 0; s < terms.dim(0); ++s) {
    const auto part = [&](const Tensor& x) { return x.rows(s * tokens, (s + 1) * tokens); };
    multiply(kOp, stream, part(a), columns, true, part(b), false, terms.rows(s, s + 1).view({columns.size(), b.dim(1)}),
             0.0f);
  }
}

bool matmul_leaves(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps, DType leaf,
                   std::span<const Tensor> nodes) {
  constexpr auto kOp = "matmul_leaves";
  expect_float(kOp, "a", a, 2);
  expect(kOp, "b", b, a.dtype(), {a.dim(1), b.dim(1)});
  INVAR_CHECK(!nodes.empty(), "{}: no node", kOp);
  for (const Tensor& node : nodes) expect(kOp, "a node", node, nodes.front().dtype(), {a.dim(0), b.dim(1)});
  expect_steps(kOp, steps, a.dim(1), std::ssize(nodes));
  INVAR_CHECK(leaf == DType::kF32 || leaf == DType::kBF16, "{}: leaves of {}", kOp, name_of(leaf));
  INVAR_CHECK(nodes.size() == 1 || nodes.front().dtype() == DType::kF32, "{}: nodes of a sum that are rounded", kOp);
  if (stream.invariant() && a.dtype() == DType::kBF16 && steps.size() > 1) stream.note_momentary(kLeavesProofBytes);
  if (!stream.invariant() || !on_cuda(stream) || a.empty() || b.empty()) return false;
  if (!has_work(kOp, stream, {&a, &b, &nodes.front()})) return true;
  return cuda::multiply_leaves(stream.cuda(), a, b, steps, leaf, nodes);
}

}  // namespace invar::ops
