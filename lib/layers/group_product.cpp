#include "layers/group_product.h"

#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "parallel/tree_collectives.h"

namespace invar {

using ops::Transpose;

GroupProduct::GroupProduct(const LayerContext& ctx, const LeafCut* leaves, int64_t columns)
    : ctx_(ctx), leaves_(leaves) {
  // A single leaf is the sum.
  const bool alone = leaves_ != nullptr && leaves_->plan.ranks() == 1;
  if (alone && leaves_->rows.size() == 1) leaves_ = nullptr;
  if (alone && leaves_ != nullptr) {
    root_ = ctx.scratch.allocate("sum of leaves", ctx.activation, {ctx.region.tokens(), columns});
  }
  DType dtype = ctx.region.partial_dtype(ctx.activation);
  if (leaves_ != nullptr) dtype = leaves_->plan.one_leaf_each() ? leaf_dtype() : DType::kF32;
  const int terms = leaves_ == nullptr ? 1 : leaves_->program.buffers;
  for (int term = 0; term < terms; ++term) {
    terms_.push_back(ctx.scratch.allocate("terms of a product", dtype, {ctx.region.tokens(), columns}));
  }
}

DType GroupProduct::leaf_dtype() const {
  return leaves_->may_be_alone ? ctx_.region.leaf_dtype() : DType::kF32;
}

void GroupProduct::multiply(const Tensor& a, const Tensor& w) {
  if (leaves_ == nullptr) return multiply_rows(0, a, w);
  std::vector<ops::LeafStep> steps;
  for (const LeafProgram::Step& step : leaves_->program.steps) {
    steps.push_back({leaves_->rows[steps.size()], step.buffer, step.accumulate, step.joins});
  }
  const bool alone = root_.defined();
  const std::span<const Tensor> nodes(alone ? &root_ : terms_.data(), leaves_->program.nodes.size());
  if (!ops::matmul_leaves(ctx_.stream, a, w, steps, leaf_dtype(), nodes)) return multiply_rows(0, a, w);
  root_made_ = alone;
}

void GroupProduct::multiply_rows(int64_t first, const Tensor& a, const Tensor& w) const {
  std::vector<Tensor> terms;
  for (const Tensor& term : terms_) terms.push_back(term.rows(first, first + a.dim(0)));
  if (leaves_ == nullptr) return ops::matmul(ctx_.stream, a, Transpose::kNo, w, Transpose::kNo, terms.front());
  const ArenaScope scope(ctx_.scratch);
  Tensor leaf;  // that is rounded on its way to an f32 term
  if (leaf_dtype() != terms.front().dtype()) {
    leaf = ctx_.scratch.allocate("a leaf", leaf_dtype(), {a.dim(0), w.dim(1)});
  }
  size_t index = 0;
  for (LeafSum sum(leaves_->program, terms); !sum.finished(); sum.leaf_done(ctx_.stream)) {
    const Range rows = leaves_->rows[index++];
    const auto multiply_leaf = [&](const Tensor& out, float beta) {
      ops::matmul_columns(ctx_.stream, a, rows, Transpose::kNo, w.rows(rows.begin, rows.end), out, beta);
    };
    if (leaf.defined()) {
      multiply_leaf(leaf, 0.0f);
      sum.put(ctx_.stream, leaf);
    } else {
      multiply_leaf(sum.target(), sum.accumulate() ? 1.0f : 0.0f);
    }
  }
}

Tensor GroupProduct::sum() const {
  if (leaves_ == nullptr) return ctx_.region.reduce(ctx_.stream, ctx_.scratch, terms_.front(), ctx_.activation);
  if (root_.defined()) {
    if (!root_made_) ops::copy(ctx_.stream, terms_.front(), root_);
    return root_;
  }
  const std::span<const Tensor> nodes(terms_.data(), leaves_->program.nodes.size());
  return ctx_.region.reduce_nodes(ctx_.stream, ctx_.scratch, leaves_->plan, nodes, ctx_.activation);
}

void sum_leaves(const LayerContext& ctx, const LeafCut& cut, std::span<const Tensor> leaves, const Tensor& out) {
  tree_all_reduce(ctx.stream, ctx.region.group(), cut.plan, nodes_of_leaves(ctx.stream, cut.program, leaves), out,
                  ctx.scratch);
}

}  // namespace invar
