#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "parallel/cut_product.h"
#include "parallel/invariant_gradients.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

// out f32 (A) = the sum over all ranks' leaves, f32 (A) each, of which these are this rank's; they are overwritten.
void sum_leaves(const SumContext& ctx, const LeafCut& cut, std::span<const Tensor> leaves, const Tensor& out) {
  tree_all_reduce(ctx.stream, ctx.region.group(), cut.plan, nodes_of_leaves(ctx.stream, cut.program, leaves), out,
                  ctx.scratch);
}

class InvariantSums : public SumPolicy {
 public:
  InvariantSums(const NumericsContract& contract, std::optional<WorkerOrder> samples, const Stream& stream)
      : contract_(contract), samples_(std::move(samples)) {
    numerics_.invariant = true;
    if (stream.device() == DeviceType::kMeta && stream.target() == DeviceType::kCuda) {
      numerics_.proof_bytes = &proof_bytes_;
    }
  }

  UnitCut cut(int64_t units, const Communicator& tensor) const override { return {units, contract_.leaves, tensor}; }
  HeadCut cut_heads(int64_t query_heads, int64_t kv_heads, const Communicator& tensor) const override {
    return {query_heads, kv_heads, contract_.leaves, tensor};
  }
  int64_t token_block() const override { return contract_.token_block; }
  // Whatever the ranks make, each gets the whole sum in the contract's order.
  void set_copies(Parameter& parameter, Communicator* group, bool /*in_parts*/) const override {
    parameter.replicas = group;
  }
  GradientLayout gradient_layout() const override { return {samples_ ? samples_->kept() : 1, true}; }

  // A single leaf of a rank alone is the sum.
  std::unique_ptr<CutProduct> product(const SumContext& ctx, const CutDim& dim, int64_t columns) const override {
    const bool is_sum = dim->plan.ranks() == 1 && dim->rows.size() == 1;
    return is_sum ? partial_product(ctx, columns, numerics_) : leaf_product(ctx, *dim, columns, numerics_);
  }

  // The sum of each leaf is a number of its own; maxima are exact in any order, and so is a sum with one term that is
  // not zero.
  void vocabulary_statistics(const SumContext& ctx, const CutDim& vocabulary,
                             const VocabularyLogits& logits) const override {
    const auto& [values, labels, rows, vocab_size, maximum, sums_and_target] = logits;
    Communicator& group = ctx.region.group();
    const int64_t n = values.dim(0);
    const Tensor target = sums_and_target.rows(1, 2).view({n});
    std::vector<Tensor> maxima, sums, targets;
    for (size_t leaf = 0; leaf < vocabulary->rows.size(); ++leaf) {
      for (std::vector<Tensor>* of_leaf : {&maxima, &sums, &targets}) {
        of_leaf->push_back(ctx.scratch.allocate("of a leaf", DType::kF32, {n}));
      }
      ops::logits_statistics(ctx.stream, values, vocabulary->rows[leaf], labels, rows, vocab_size, maxima[leaf],
                             sums[leaf], targets[leaf]);
      if (leaf == 0) {
        ops::copy(ctx.stream, maxima[leaf], maximum);
        ops::copy(ctx.stream, targets[leaf], target);
      } else {
        ops::maximum(ctx.stream, maximum, maxima[leaf], maximum);
        ops::add(ctx.stream, target, targets[leaf], target);
      }
    }
    group.all_reduce(ctx.stream, maximum, ReduceOp::kMax);
    group.all_reduce(ctx.stream, target, ReduceOp::kSum);
    for (size_t leaf = 0; leaf < vocabulary->rows.size(); ++leaf) {
      ops::rescale_sum_exp(ctx.stream, maxima[leaf], maximum, sums[leaf]);
    }
    sum_leaves(ctx, *vocabulary, sums, sums_and_target.rows(0, 1).view({n}));
  }

  void sum_columns(const SumContext& ctx, const CutDim& columns, const Tensor& out,
                   const ColumnSums& make) const override {
    const ArenaScope scope(ctx.scratch);
    const int64_t held = std::ssize(columns->rows);
    const Tensor by_leaf = ctx.scratch.allocate("sums by leaf", DType::kF32, {held, out.dim(0), out.dim(1)});
    make(by_leaf, columns->rows);
    std::vector<Tensor> leaves;
    for (int64_t leaf = 0; leaf < held; ++leaf) {
      leaves.push_back(by_leaf.rows(leaf, leaf + 1).view({out.numel()}));
    }
    sum_leaves(ctx, *columns, leaves, out.view({out.numel()}));
  }

  // A part of a sample that depends on the model alone, or whole samples.
  int64_t head_chunk(const SumContext& ctx, int64_t best) const override {
    if (contract_.head_chunk_tokens < ctx.sequence_length) return contract_.head_chunk_tokens;
    return std::max<int64_t>(1, best / ctx.sequence_length) * ctx.sequence_length;
  }

  std::unique_ptr<GradientSink> gradients(const ParameterTable& table, GradientListener& listener) const override {
    return std::make_unique<InvariantGradients>(table, samples(), numerics_, listener);
  }
  std::unique_ptr<ReplicaSums> over_replicas(const SyncContext& ctx) const override {
    return invariant_replica_sums(ctx, samples().plan());
  }
  std::unique_ptr<GradientNorm> norm(const RowOwnership& ownership, Arena& constants) const override {
    return invariant_norm(ownership, constants);
  }

 private:
  const WorkerOrder& samples() const {
    INVAR_CHECK(samples_.has_value(), "sums over samples of a layout without a step");
    return *samples_;
  }

  NumericsContract contract_;
  std::optional<WorkerOrder> samples_;
};

}  // namespace

std::unique_ptr<SumPolicy> invariant_sums(const NumericsContract& contract, std::optional<WorkerOrder> samples,
                                          const Stream& stream) {
  return std::make_unique<InvariantSums>(contract, std::move(samples), stream);
}

}  // namespace invar
