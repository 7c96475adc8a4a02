#include "parallel/replica_sums.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/integer.h"
#include "device/device.h"
#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {

int64_t aligned(int64_t element) {
  return round_up(element, ParameterTable::kAlignment);
}

int replicas_of(const SharedBlock& block) {
  return static_cast<int>(block.holders.size());
}

// Of a block all elements, or those of one weight.
std::vector<Range> parts_of(const SharedBlock& block, std::optional<WeightId> weight) {
  if (!weight) return {{0, block.elements}};
  std::vector<Range> parts;
  for (const SharedBlock::Part& part : block.parts) {
    if (part.weight == *weight) parts.push_back({part.begin, part.begin + part.elements});
  }
  return parts;
}

// In the staging of a tree, the row of a replica's node.
int64_t row_of(const TreePlan& plan, int replica, int node) {
  int64_t row = plan.rows_of_round(node).begin;
  for (int r = 0; r < replica; ++r) row += std::ssize(plan.nodes(r)) > node ? 1 : 0;
  return row;
}

// Of weights of the bucket whose second user's gradient is kept apart, adds it to the first one's.
// sum_second(weight): completes it before.
template <class F>
void add_second_users(const SyncContext& ctx, size_t bucket, const F& sum_second) {
  for (const WeightId id : ctx.table.layout()) {
    const Weight& weight = ctx.table.weight(id);
    if (weight.second_user < 0 || ctx.ownership.bucket_of(id) != bucket) continue;
    sum_second(id);
    const int64_t shift = weight.second_user - weight.offset;
    for (const Range& summed : ctx.ownership.summed(bucket)) {
      const Range own = intersect(summed, weight.elements());
      if (own.empty()) continue;
      const Tensor first = ctx.table.gradients(0, own);
      ops::add(ctx.queue, first, ctx.table.gradients(0, {own.begin + shift, own.end + shift}), first);
    }
  }
}

// Replicas of one width, in fast numerics.
class ScatteredSums : public ReplicaSums {
 public:
  explicit ScatteredSums(const SyncContext& ctx) : ctx_(ctx) {}

  void sum(size_t bucket) override {
    Communicator& holders = *ctx_.groups.holders;
    if (holders.size() == 1) return;
    const Tensor& gradients = ctx_.table.flat_gradients();
    const Range elements = ctx_.ownership.buckets()[bucket].elements;
    const std::vector<Range> summed = ctx_.ownership.summed(bucket);
    const Range own = summed.empty() ? Range{} : summed.front();
    holders.reduce_scatter(ctx_.queue, gradients.rows(elements.begin, elements.end), gradients.rows(own.begin, own.end),
                           owned_counts(ctx_.ownership, bucket), ReduceOp::kSum);
  }

 private:
  SyncContext ctx_;
};

// Replicas of one width, by a tree.
class TreeSums : public ReplicaSums {
 public:
  TreeSums(const SyncContext& ctx, const TreePlan& plan) : ctx_(ctx), plan_(plan) {}

  void sum(size_t bucket) override {
    const RowOwnership::Bucket& cut = ctx_.ownership.buckets()[bucket];
    sum_nodes(cut.elements, owned_counts(ctx_.ownership, bucket));
    add_second_users(ctx_, bucket, [&](WeightId id) {
      const Weight& weight = ctx_.table.weight(id);
      std::vector<int64_t> counts;
      for (int rank = 0; rank < ctx_.groups.holders->size(); ++rank) {
        const Range owned = cut.blocks.front().owned(rank);
        const int64_t begin = cut.elements.begin;
        counts.push_back(intersect({begin + owned.begin, begin + owned.end}, weight.elements()).size());
      }
      sum_nodes({weight.second_user, weight.second_user + weight.elements().size()}, counts);
    });
  }

 private:
  // Of these elements of the gradient buffers a rank gets counts[rank], at their place in the first buffer.
  void sum_nodes(Range elements, std::span<const int64_t> counts) {
    Communicator& holders = *ctx_.groups.holders;
    if (holders.size() == 1) return;  // the root is there
    std::vector<Tensor> nodes;
    for (size_t node = 0; node < plan_.nodes(holders.rank()).size(); ++node) {
      nodes.push_back(ctx_.table.gradients(static_cast<int>(node), elements));
    }
    const auto first = counts.begin();
    const int64_t begin = std::accumulate(first, first + holders.rank(), int64_t{0});
    const Tensor own = nodes.front().rows(begin, begin + counts[static_cast<size_t>(holders.rank())]);
    tree_reduce_scatter(ctx_.queue, holders, plan_, nodes, counts, own, ctx_.staging);
  }

  SyncContext ctx_;
  const TreePlan& plan_;
};

// Replicas of unequal widths: every rank sends its part of each block (SharedBlock) to the rank that owns it, which
// adds them by a tree over the replicas.
class ExchangedSums : public ReplicaSums {
 public:
  ExchangedSums(const SyncContext& ctx, TreePlan plan) : ctx_(ctx), plan_(std::move(plan)) {}

  // The first users of a bucket's weights, then a second one's.
  void sum(size_t bucket) override {
    exchange(bucket, std::nullopt);
    add_second_users(ctx_, bucket, [&](WeightId id) { exchange(bucket, id); });
  }

 private:
  // What one exchange moves, and what is then added.
  struct Terms {
    struct Sum {
      Tensor terms;  // f32 (nodes, elements)
      Tensor out;
    };
    std::vector<Message> sends, receives;
    std::vector<Sum> sums;
  };

  // Each replica's nodes of a block go to the rank that owns the elements. second: only of this weight, its second
  // user's.
  void exchange(size_t bucket, std::optional<WeightId> second) {
    const ArenaScope scope(ctx_.staging);
    const RowOwnership& ownership = ctx_.ownership;
    const RowOwnership::Bucket& cut = ownership.buckets()[bucket];
    const int64_t shift = second ? ctx_.table.weight(*second).second_user - ctx_.table.weight(*second).offset : 0;
    Terms terms;
    for (const SharedBlock& block : cut.blocks) {
      const int64_t place = ownership.place(cut, block);
      if (place < 0) continue;
      for (const Range& part : parts_of(block, second)) {
        for (int replica = 0; replica < replicas_of(block); ++replica) {
          const Range owned = intersect(block.owned(replica), part);
          if (owned.empty()) continue;
          const Range mine{place + shift + owned.begin, place + shift + owned.end};
          if (replica == ownership.replica()) {
            take(block, mine, terms);
          } else {
            give(block.holders[static_cast<size_t>(replica)].world_rank, mine, terms);
          }
        }
      }
    }
    ctx_.groups.exchange->exchange(ctx_.queue, terms.sends, terms.receives);
    for (const Terms::Sum& sum : terms.sums) ops::tree_sum(ctx_.queue, plan_.program(), sum.terms, sum.out);
  }

  // This rank's nodes of the elements.
  void give(int owner, Range elements, Terms& terms) const {
    const auto nodes = static_cast<int>(plan_.nodes(ctx_.ownership.replica()).size());
    for (int node = 0; node < nodes; ++node) terms.sends.push_back({ctx_.table.gradients(node, elements), owner});
  }

  // The nodes of all replicas side by side: this rank's copied, the others' received.
  void take(const SharedBlock& block, Range elements, Terms& terms) const {
    const Tensor all =
        ctx_.staging.allocate("gradients of replicas", DType::kF32, {plan_.total_nodes(), elements.size()});
    for (int replica = 0; replica < replicas_of(block); ++replica) {
      for (int node = 0; node < static_cast<int>(plan_.nodes(replica).size()); ++node) {
        const int64_t row = row_of(plan_, replica, node);
        const Tensor term = all.rows(row, row + 1).view({elements.size()});
        if (replica == ctx_.ownership.replica()) {
          ops::copy(ctx_.queue, ctx_.table.gradients(node, elements), term);
        } else {
          terms.receives.push_back({term, block.holders[static_cast<size_t>(replica)].world_rank});
        }
      }
    }
    terms.sums.push_back({all, ctx_.table.gradients(0, elements)});
  }

  SyncContext ctx_;
  TreePlan plan_;
};

// Where layers on several ranks of a replica each made a part of a gradient, adds these first, on the stream itself.
class SumsOfParts : public ReplicaSums {
 public:
  SumsOfParts(const SyncContext& ctx, std::unique_ptr<ReplicaSums> rest)
      : ctx_(ctx), parts_(copied_rows(ctx.table, ctx.ownership, true)), rest_(std::move(rest)) {}

  void sum(size_t bucket) override {
    for (const CopiedRows& part : parts_[bucket]) {
      const Tensor rows = ctx_.table.flat_gradients().rows(part.elements.begin, part.elements.end);
      part.group->all_reduce(ctx_.stream, rows, ReduceOp::kSum);
    }
    wait_for(ctx_.queue, ctx_.stream);
    rest_->sum(bucket);
  }

 private:
  SyncContext ctx_;
  std::vector<std::vector<CopiedRows>> parts_;  // by bucket
  std::unique_ptr<ReplicaSums> rest_;
};

}  // namespace

std::unique_ptr<ReplicaSums> fast_replica_sums(const SyncContext& ctx) {
  const int replicas = ctx.groups.topology.replicas();
  if (ctx.groups.exchange == nullptr) {
    return std::make_unique<SumsOfParts>(ctx, std::make_unique<ScatteredSums>(ctx));
  }
  return std::make_unique<SumsOfParts>(
      ctx, std::make_unique<ExchangedSums>(ctx, TreePlan(replicas, split_units(replicas, replicas))));
}

std::unique_ptr<ReplicaSums> invariant_replica_sums(const SyncContext& ctx, const TreePlan& plan) {
  std::unique_ptr<ReplicaSums> sums;
  if (ctx.groups.exchange == nullptr) {
    sums = std::make_unique<TreeSums>(ctx, plan);
  } else {
    sums = std::make_unique<ExchangedSums>(ctx, plan);
  }
  return std::make_unique<SumsOfParts>(ctx, std::move(sums));
}

const std::vector<int64_t>& owned_counts(const RowOwnership& ownership, size_t bucket) {
  return ownership.buckets()[bucket].blocks.front().counts;
}

std::vector<std::vector<CopiedRows>> copied_rows(const ParameterTable& table, const RowOwnership& ownership,
                                                 bool in_parts) {
  std::vector<std::vector<CopiedRows>> rows(ownership.buckets().size());
  table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun&, Range elements) {
    if (parameter.replicas == nullptr || parameter.replicas->size() == 1) return;
    if (in_parts && !parameter.partial_gradient) return;
    const auto id = static_cast<WeightId>(&weight - table.weights().data());
    std::vector<CopiedRows>& copies = rows[ownership.bucket_of(id)];
    const bool joins =
        !copies.empty() && copies.back().group == parameter.replicas &&
        (elements.begin == copies.back().elements.end || elements.begin == aligned(copies.back().elements.end));
    if (joins) {
      copies.back().elements.end = elements.end;
    } else {
      copies.push_back({parameter.replicas, elements});
    }
  });
  return rows;
}

}  // namespace invar
