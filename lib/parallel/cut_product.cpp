#include "parallel/cut_product.h"

#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

using ops::Transpose;

class PartialProduct : public CutProduct {
 public:
  PartialProduct(const SumContext& ctx, int64_t columns, const ops::Numerics& numerics)
      : ctx_(ctx),
        numerics_(numerics),
        partial_(ctx.scratch.allocate("part of a product", ctx.region.partial_dtype(ctx.activation),
                                      {ctx.region.tokens(), columns})) {}

  void multiply(const Tensor& a, const Tensor& w) override { multiply_rows(0, a, w); }
  void multiply_rows(int64_t first, const Tensor& a, const Tensor& w) override {
    ops::matmul(ctx_.stream, a, Transpose::kNo, w, Transpose::kNo, partial_.rows(first, first + a.dim(0)), 0.0f,
                numerics_);
  }
  Tensor sum() override { return ctx_.region.reduce(ctx_.stream, ctx_.scratch, partial_, ctx_.activation); }

 private:
  SumContext ctx_;
  const ops::Numerics& numerics_;
  Tensor partial_;  // (T, N)
};

class LeafProduct : public CutProduct {
 public:
  LeafProduct(const SumContext& ctx, const LeafCut& cut, int64_t columns, const ops::Numerics& numerics)
      : ctx_(ctx), cut_(cut), numerics_(numerics), leaf_(cut.may_be_alone ? ctx.region.reduce_dtype() : DType::kF32) {
    const auto allocate = [&](std::string_view label, DType dtype) {
      return ctx.scratch.allocate(label, dtype, {ctx.region.tokens(), columns});
    };
    if (cut.plan.ranks() == 1) root_ = allocate("sum of leaves", ctx.activation);
    const DType dtype = cut.plan.one_leaf_each() ? leaf_ : DType::kF32;
    for (int i = 0; i < cut.program.buffers; ++i) buffers_.push_back(allocate("sums of leaves", dtype));
    for (const LeafProgram::Step& step : cut.program.steps) {
      steps_.push_back({cut.rows[steps_.size()], step.buffer, step.accumulate, step.joins});
    }
  }

  void multiply(const Tensor& a, const Tensor& w) override {
    const ArenaScope scope(ctx_.scratch);
    const std::span<const Tensor> nodes(root_.defined() ? &root_ : buffers_.data(), cut_.program.nodes.size());
    ops::matmul_leaves(ctx_.stream, a, w, steps_, space(buffers_), nodes, numerics_);
  }

  // Chunks of a product have long leaves, for which the library's products are faster than one kernel.
  void multiply_rows(int64_t first, const Tensor& a, const Tensor& w) override {
    const ArenaScope scope(ctx_.scratch);
    const auto rows_of = [&](const Tensor& whole) { return whole.rows(first, first + a.dim(0)); };
    std::vector<Tensor> rows;
    for (const Tensor& buffer : buffers_) rows.push_back(rows_of(buffer));
    ops::matmul_leaf_by_leaf(ctx_.stream, a, w, steps_, space(rows), numerics_);
    if (root_.defined()) ops::copy(ctx_.stream, rows.front(), rows_of(root_));
  }

  Tensor sum() override {
    if (root_.defined()) return root_;
    const TensorRegion& region = ctx_.region;
    const int64_t rows = region.local_tokens().size(), columns = buffers_.front().dim(1);
    const Tensor sum = ctx_.scratch.allocate("reduced", ctx_.activation, {rows * columns});
    std::vector<Tensor> nodes;
    for (size_t i = 0; i < cut_.program.nodes.size(); ++i) {
      nodes.push_back(buffers_[i].view({buffers_[i].numel()}));
    }
    if (region.sequence_parallel()) {
      tree_reduce_scatter(ctx_.stream, region.group(), cut_.plan, nodes, region.counts(columns), sum, ctx_.scratch);
    } else {
      tree_all_reduce(ctx_.stream, region.group(), cut_.plan, nodes, sum, ctx_.scratch);
    }
    return sum.view({rows, columns});
  }

 private:
  // With room for a leaf that is rounded on its way to an f32 sum.
  ops::LeafSpace space(std::span<const Tensor> buffers) const {
    ops::LeafSpace space{buffers, {}};
    const Tensor& like = buffers.front();
    if (leaf_ != like.dtype()) space.rounded = ctx_.scratch.allocate("a leaf", leaf_, {like.dim(0), like.dim(1)});
    return space;
  }

  SumContext ctx_;
  const LeafCut& cut_;
  const ops::Numerics& numerics_;
  DType leaf_;
  Tensor root_;                  // (T, N) of the activation dtype, if all leaves are on this rank
  std::vector<Tensor> buffers_;  // (T, N): the stack of sums, in the end this rank's nodes
  std::vector<ops::LeafStep> steps_;
};

}  // namespace

std::unique_ptr<CutProduct> partial_product(const SumContext& ctx, int64_t columns, const ops::Numerics& numerics) {
  return std::make_unique<PartialProduct>(ctx, columns, numerics);
}

std::unique_ptr<CutProduct> leaf_product(const SumContext& ctx, const LeafCut& cut, int64_t columns,
                                         const ops::Numerics& numerics) {
  return std::make_unique<LeafProduct>(ctx, cut, columns, numerics);
}

}  // namespace invar
