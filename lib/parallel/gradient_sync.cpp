#include "parallel/gradient_sync.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {

int64_t aligned(int64_t element) {
  return round_up(element, ParameterTable::kAlignment);
}

// Replicas of one width: what each data rank owns of a bucket.
const std::vector<int64_t>& counts_of(const RowOwnership& ownership, size_t bucket) {
  return ownership.buckets()[bucket].blocks.front().counts;
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

}  // namespace

GradientSync::GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
                           const Stream& stream, const WorkerOrder* order, Arena& staging)
    : table_(table),
      ownership_(ownership),
      data_(*groups.data),
      exchange_(groups.exchange.get()),
      stream_(stream),
      queue_(groups.topology.data > 1 ? queue_beside(stream) : stream),
      order_(order),
      staging_(staging),
      buckets_(ownership.buckets().size()) {
  for (const WeightId id : table.layout()) buckets_[ownership.bucket_of(id)].users += table.weight(id).users;
  if (exchange_ != nullptr) {
    const int64_t terms = groups.topology.data;
    replica_plan_.emplace(terms, split_units(terms, groups.topology.data));
  }
  const bool may_drift =  // two terms have one sum
      order == nullptr && !ownership.exclusive() && data_.size() > 2 && !data_.adds_in_rank_order();
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (parameter.replicas == nullptr || parameter.replicas->size() == 1) return;
    INVAR_CHECK(order == nullptr || !parameter.partial_gradient, "'{}' is a term of a sum in fixed order",
                parameter.name);
    if (parameter.partial_gradient) add_copies(&BucketState::partial, parameter.replicas, elements);
    if (may_drift && parameter.trained) add_copies(&BucketState::equal, parameter.replicas, elements);
  });
  if (may_drift) check_equal_cuts(*groups.world);
}

// Joins neighbours of one bucket, the padding between weights too.
void GradientSync::add_copies(std::vector<Copies> BucketState::*kind, Communicator* group, Range elements) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!ownership_.buckets()[b].elements.contains(elements.begin)) continue;
    std::vector<Copies>& copies = buckets_[b].*kind;
    const bool joins =
        !copies.empty() && copies.back().group == group &&
        (elements.begin == copies.back().elements.end || elements.begin == aligned(copies.back().elements.end));
    if (joins) {
      copies.back().elements.end = elements.end;
    } else {
      copies.push_back({group, elements});
    }
  }
}

Range GradientSync::own_part(size_t bucket, Range elements) const {
  INVAR_CHECK(!ownership_.exclusive(), "what is owned of a bucket has many parts");
  const std::vector<Range> own = ownership_.owned(bucket);
  return own.empty() ? Range{} : intersect(own.front(), elements);
}

// Copies are made equal by the ranks that own the same part of each.
void GradientSync::check_equal_cuts(Communicator& world) const {
  int64_t unequal = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const Copies& copies : buckets_[b].equal) {
      const Range own = own_part(b, copies.elements);
      for (const int64_t place : {own.begin - copies.elements.begin, own.size()}) {
        const int64_t least = all_reduce_value(*copies.group, own.empty() ? -1 : place, ReduceOp::kMin);
        const int64_t most = all_reduce_value(*copies.group, own.empty() ? -1 : place, ReduceOp::kMax);
        if (least != most) unequal = 1;
      }
    }
  }
  INVAR_CHECK(all_reduce_value(world, unequal, ReduceOp::kMax) == 0,
              "the sums over {} data ranks would let copies of rows drift apart", data_.size());
}

void GradientSync::begin_last_micro_batch() {
  last_micro_batch_ = true;
  for (BucketState& bucket : buckets_) bucket.missing = bucket.users;
}

void GradientSync::gradient_done(WeightId id) {
  if (!last_micro_batch_) return;
  const size_t bucket = ownership_.bucket_of(id);
  INVAR_CHECK(buckets_[bucket].missing > 0, "'{}' has more users than it says", table_.weight(id).name);
  if (--buckets_[bucket].missing == 0) sum(bucket);
}

void GradientSync::sum(size_t bucket) {
  buckets_[bucket].summed = true;
  if (order_ != nullptr && exchange_ == nullptr) return sum_in_order(bucket);
  const Tensor& gradients = table_.flat_gradients();
  for (const Copies& part : buckets_[bucket].partial) {
    part.group->all_reduce(stream_, gradients.rows(part.elements.begin, part.elements.end), ReduceOp::kSum);
  }
  if (exchange_ != nullptr) return exchange_sums(bucket);
  if (data_.size() == 1) return;
  const Range elements = ownership_.buckets()[bucket].elements;
  const Range own = own_part(bucket, elements);
  wait_for(queue_, stream_);
  data_.reduce_scatter(queue_, gradients.rows(elements.begin, elements.end), gradients.rows(own.begin, own.end),
                       counts_of(ownership_, bucket), ReduceOp::kSum);
}

// The terms of the data ranks by the tree, then the two terms of a weight with two users.
void GradientSync::sum_in_order(size_t bucket) {
  const SharedBlock& block = ownership_.buckets()[bucket].blocks.front();
  const int64_t begin = ownership_.buckets()[bucket].elements.begin;
  wait_for(queue_, stream_);
  sum_nodes(ownership_.buckets()[bucket].elements, block.counts);
  for (const WeightId id : table_.layout()) {
    const Weight& weight = table_.weight(id);
    if (weight.second_term < 0 || ownership_.bucket_of(id) != bucket) continue;
    std::vector<int64_t> counts;
    for (int rank = 0; rank < data_.size(); ++rank) {
      const Range owned = block.owned(rank);
      counts.push_back(intersect({begin + owned.begin, begin + owned.end}, weight.elements()).size());
    }
    const int64_t shift = weight.second_term - weight.offset;
    sum_nodes({weight.second_term, weight.second_term + weight.elements().size()}, counts);
    const Range own = own_part(bucket, weight.elements());
    if (own.empty()) continue;
    const Tensor first = table_.gradients(0, own);
    ops::add(queue_, first, table_.gradients(0, {own.begin + shift, own.end + shift}), first);
  }
}

// Of these elements of the gradient buffers a rank gets counts[rank], at their place in the first buffer.
void GradientSync::sum_nodes(Range elements, std::span<const int64_t> counts) {
  if (data_.size() == 1) return;  // the root is there
  std::vector<Tensor> nodes;
  for (size_t node = 0; node < order_->plan().nodes(data_.rank()).size(); ++node) {
    nodes.push_back(table_.gradients(static_cast<int>(node), elements));
  }
  const auto first = counts.begin();
  const int64_t begin = std::accumulate(first, first + data_.rank(), int64_t{0});
  const Tensor own = nodes.front().rows(begin, begin + counts[static_cast<size_t>(data_.rank())]);
  tree_reduce_scatter(queue_, data_, order_->plan(), nodes, counts, own, staging_);
}

// The first terms of a bucket's weights, then the second one of a weight that has it.
void GradientSync::exchange_sums(size_t bucket) {
  wait_for(queue_, stream_);
  exchange_terms(bucket, std::nullopt);
  for (const WeightId id : table_.layout()) {
    const Weight& weight = table_.weight(id);
    if (weight.second_term < 0 || ownership_.bucket_of(id) != bucket) continue;
    exchange_terms(bucket, id);
    const int64_t shift = weight.second_term - weight.offset;
    for (const Range& owned : ownership_.owned(bucket)) {
      const Range own = intersect(owned, weight.elements());
      if (own.empty()) continue;
      const Tensor first = table_.gradients(0, own);
      ops::add(queue_, first, table_.gradients(0, {own.begin + shift, own.end + shift}), first);
    }
  }
}

// Each replica's nodes of a block go to the rank that owns the elements. second: only of this weight, its second term.
void GradientSync::exchange_terms(size_t bucket, std::optional<WeightId> second) {
  const ArenaScope scope(staging_);
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  const int64_t shift = second ? table_.weight(*second).second_term - table_.weight(*second).offset : 0;
  Terms terms;
  for (const SharedBlock& block : cut.blocks) {
    const int64_t place = ownership_.place(cut, block);
    if (place < 0) continue;
    for (const Range& part : parts_of(block, second)) {
      for (int replica = 0; replica < replicas_of(block); ++replica) {
        const Range owned = intersect(block.owned(replica), part);
        if (owned.empty()) continue;
        const Range mine{place + shift + owned.begin, place + shift + owned.end};
        if (replica == ownership_.replica()) {
          take_terms(block, mine, terms);
        } else {
          give_terms(block.holders[static_cast<size_t>(replica)].world_rank, mine, terms);
        }
      }
    }
  }
  exchange_->exchange(queue_, terms.sends, terms.receives);
  for (const Terms::Sum& sum : terms.sums) ops::tree_sum(queue_, plan().program(), sum.terms, sum.out);
}

// This rank's nodes of the elements.
void GradientSync::give_terms(int owner, Range elements, Terms& terms) const {
  const auto nodes = static_cast<int>(plan().nodes(ownership_.replica()).size());
  for (int node = 0; node < nodes; ++node) terms.sends.push_back({table_.gradients(node, elements), owner});
}

// The nodes of all replicas side by side: this rank's copied, the others' received.
void GradientSync::take_terms(const SharedBlock& block, Range elements, Terms& terms) {
  const Tensor all = staging_.allocate("gradients of replicas", DType::kF32, {plan().total_nodes(), elements.size()});
  for (int replica = 0; replica < replicas_of(block); ++replica) {
    for (int node = 0; node < static_cast<int>(plan().nodes(replica).size()); ++node) {
      const int64_t row = row_of(plan(), replica, node);
      const Tensor term = all.rows(row, row + 1).view({elements.size()});
      if (replica == ownership_.replica()) {
        ops::copy(queue_, table_.gradients(node, elements), term);
      } else {
        terms.receives.push_back({term, block.holders[static_cast<size_t>(replica)].world_rank});
      }
    }
  }
  terms.sums.push_back({all, table_.gradients(0, elements)});
}

// From the owners to all that hold the rows.
void GradientSync::exchange_values(size_t bucket) {
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  std::vector<Message> sends, receives;
  for (const SharedBlock& block : cut.blocks) {
    const auto part = [&](int64_t begin, int replica) {
      const Range owned = block.owned(replica);
      return table_.flat_values().rows(begin + owned.begin, begin + owned.end);
    };
    const int64_t place = ownership_.place(cut, block);
    const Tensor own = place >= 0 ? part(place, ownership_.replica()) : Tensor();
    const auto hand_on = [&](const SharedBlock::Place& to, int to_replica) {
      if (to.world_rank == exchange_->rank()) {
        for (int from = 0; from < replicas_of(block); ++from) {
          if (from == to_replica || block.owned(from).empty()) continue;
          receives.push_back({part(to.begin, from), block.holders[static_cast<size_t>(from)].world_rank});
        }
      } else if (place >= 0 && !own.empty()) {
        sends.push_back({own, to.world_rank});
      }
    };
    for (int replica = 0; replica < replicas_of(block); ++replica) {
      hand_on(block.holders[static_cast<size_t>(replica)], replica);
    }
    for (const SharedBlock::Place& copy : block.copies) hand_on(copy, -1);
  }
  exchange_->exchange(queue_, sends, receives);
}

void GradientSync::finish() {
  for (size_t b = buckets_.size(); b-- > 0;) {
    if (!buckets_[b].summed) sum(b);
    buckets_[b].summed = false;
  }
  last_micro_batch_ = false;
  wait_for(stream_, queue_);
  make_copies_equal();
}

void GradientSync::make_copies_equal() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const Copies& copies : buckets_[b].equal) {
      const Range own = own_part(b, copies.elements);
      if (!own.empty()) copies.group->broadcast(stream_, table_.flat_gradients().rows(own.begin, own.end), 0);
    }
  }
}

void GradientSync::publish(size_t bucket) {
  if (exchange_ == nullptr && data_.size() == 1) return;
  wait_for(queue_, stream_);
  if (exchange_ != nullptr) {
    exchange_values(bucket);
  } else {
    const Tensor& values = table_.flat_values();
    const Range elements = ownership_.buckets()[bucket].elements;
    const Range own = own_part(bucket, elements);
    data_.all_gather(queue_, values.rows(own.begin, own.end), values.rows(elements.begin, elements.end),
                     counts_of(ownership_, bucket));
  }
  buckets_[bucket].published.set(queue_);
  buckets_[bucket].awaited = false;
}

void GradientSync::await_values(WeightId id) {
  BucketState& bucket = buckets_[ownership_.bucket_of(id)];
  if (!std::exchange(bucket.awaited, true)) bucket.published.hold(stream_);
}

void GradientSync::await_values() const {
  for (const BucketState& bucket : buckets_) bucket.published.hold(stream_);
}

}  // namespace invar
