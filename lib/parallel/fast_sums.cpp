#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "parallel/cut_product.h"

namespace invar {
namespace {

class FastGradients : public GradientSink {
 public:
  FastGradients(const ParameterTable& table, GradientListener& listener) : table_(table), listener_(listener) {}

  void begin_micro_batch(const SumContext& /*ctx*/, int64_t /*first_sample*/) override {}
  void end_micro_batch(const SumContext& /*ctx*/) override {}
  Tensor vector(WeightId id) override { return table_.weight(id).gradient; }
  void add_lookups(const SumContext& ctx, const WeightUse& use, const AddLookups& add) override {
    add({0, ctx.region.tokens()}, table_.weight(use.id).gradient);
  }
  void add_product(const SumContext& ctx, const WeightUse& use, Range tokens, const Tensor& a,
                   const Tensor& b) override {
    check_product(table_.weight(use.id), tokens, a, b);
    ops::matmul(ctx.stream, a, ops::Transpose::kYes, b, ops::Transpose::kNo, table_.weight(use.id).gradient, 1.0f);
  }
  void done(WeightId id) override { listener_.gradient_done(id); }

 private:
  const ParameterTable& table_;
  GradientListener& listener_;
};

class FastSums : public SumPolicy {
 public:
  UnitCut cut(int64_t units, const Communicator& tensor) const override { return {units, 0, tensor}; }
  HeadCut cut_heads(int64_t query_heads, int64_t kv_heads, const Communicator& tensor) const override {
    return {query_heads, kv_heads, 0, tensor};
  }
  int64_t token_block() const override { return 0; }
  void set_copies(Parameter& parameter, Communicator* group, bool in_parts) const override {
    parameter.replicas = group;
    parameter.partial_gradient = group != nullptr && in_parts;
  }
  GradientLayout gradient_layout() const override { return {}; }

  std::unique_ptr<CutProduct> product(const SumContext& ctx, const CutDim& /*dim*/, int64_t columns) const override {
    return partial_product(ctx, columns, numerics_);
  }

  void vocabulary_statistics(const SumContext& ctx, const CutDim& /*vocabulary*/,
                             const VocabularyLogits& logits) const override {
    const auto& [values, labels, rows, vocab_size, maximum, sums] = logits;
    Communicator& group = ctx.region.group();
    const int64_t n = values.dim(0);
    const Tensor sum = sums.rows(0, 1).view({n});
    ops::logits_statistics(ctx.stream, values, {0, rows.size()}, labels, rows, vocab_size, maximum, sum,
                           sums.rows(1, 2).view({n}));
    if (group.size() == 1) return;
    const Tensor own = ctx.scratch.allocate("own logits max", DType::kF32, {n});
    ops::copy(ctx.stream, maximum, own);
    group.all_reduce(ctx.stream, maximum, ReduceOp::kMax);
    ops::rescale_sum_exp(ctx.stream, own, maximum, sum);
    group.all_reduce(ctx.stream, sums, ReduceOp::kSum);
  }

  void sum_columns(const SumContext& ctx, const CutDim& /*columns*/, const Tensor& out,
                   const ColumnSums& make) const override {
    make(out, {});
    ctx.region.group().all_reduce(ctx.stream, out, ReduceOp::kSum);
  }

  int64_t head_chunk(const SumContext& /*ctx*/, int64_t best) const override { return best; }

  std::unique_ptr<GradientSink> gradients(const ParameterTable& table, GradientListener& listener) const override {
    return std::make_unique<FastGradients>(table, listener);
  }
  std::unique_ptr<ReplicaSums> over_replicas(const SyncContext& ctx) const override { return fast_replica_sums(ctx); }
  std::unique_ptr<GradientNorm> norm(const RowOwnership& ownership, Arena& constants) const override {
    return fast_norm(ownership, constants);
  }
};

}  // namespace

std::unique_ptr<SumPolicy> fast_sums() {
  return std::make_unique<FastSums>();
}

}  // namespace invar
