#include "parallel/gradient_sync.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

int64_t aligned(int64_t element) {
  return round_up(element, ParameterTable::kAlignment);
}

int64_t padded_end(const Weight& weight) {
  return aligned(weight.elements().end);
}

// The row boundary nearest to `target` among the weights laid out in `bucket`.
int64_t nearest_row(const ParameterTable& table, Range bucket, int64_t target) {
  for (const WeightId id : table.layout()) {
    const Weight& weight = table.weight(id);
    if (weight.offset < bucket.begin || target >= padded_end(weight)) continue;
    const int64_t row = std::min(weight.rows, (target - weight.offset + weight.cols / 2) / weight.cols);
    return row == weight.rows ? padded_end(weight) : weight.offset + row * weight.cols;
  }
  return bucket.end;
}

}  // namespace

RowOwnership::RowOwnership(const ParameterTable& table, int data_size, int64_t bucket_elements)
    : table_(table), bucket_of_(table.weights().size()) {
  int64_t begin = 0;
  int64_t elements = 0;
  const std::vector<WeightId>& layout = table.layout();
  for (size_t i = 0; i < layout.size(); ++i) {
    const Weight& weight = table.weight(layout[i]);
    elements += weight.logical_elements();
    bucket_of_[static_cast<size_t>(layout[i])] = buckets_.size();
    const bool last_of_kind =
        i + 1 == layout.size() || table.weight(layout[i + 1]).fully_replicated() != weight.fully_replicated();
    if (elements < bucket_elements && !last_of_kind) continue;
    buckets_.push_back({{begin, padded_end(weight)}, {}});
    begin = padded_end(weight);
    elements = 0;
  }
  for (Bucket& bucket : buckets_) {
    int64_t previous = bucket.elements.begin;
    for (int rank = 1; rank <= data_size; ++rank) {
      const int64_t target = bucket.elements.begin + bucket.elements.size() * rank / data_size;
      const int64_t cut = rank == data_size ? bucket.elements.end : nearest_row(table, bucket.elements, target);
      bucket.counts.push_back(std::max(cut, previous) - previous);
      previous = std::max(cut, previous);
    }
  }
}

Range RowOwnership::Bucket::owned(int data_rank) const {
  const auto first = counts.begin();
  const int64_t begin = std::accumulate(first, first + data_rank, elements.begin);
  return {begin, begin + counts[static_cast<size_t>(data_rank)]};
}

std::vector<RowOwnership::Piece> RowOwnership::pieces(int data_rank) const {
  std::vector<Piece> pieces;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Range own = buckets_[b].owned(data_rank);
    for (const WeightId id : table_.layout()) {
      const Range elements = intersect(table_.weight(id).elements(), own);
      if (!elements.empty()) pieces.push_back({id, elements, b});
    }
  }
  return pieces;
}

GradientSync::GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
                           const Stream& stream, const WorkerOrder* order, Arena& staging)
    : table_(table),
      ownership_(ownership),
      data_(*groups.data),
      stream_(stream),
      queue_(data_.size() > 1 ? queue_beside(stream) : stream),
      order_(order),
      staging_(staging),
      buckets_(ownership.buckets().size()) {
  for (const WeightId id : table.layout()) buckets_[ownership.bucket_of(id)].users += table.weight(id).users;
  const bool may_drift =  // two terms have one sum
      order == nullptr && data_.size() > 2 && !data_.adds_in_rank_order();
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (parameter.replicas == nullptr || parameter.replicas->size() == 1) return;
    INVAR_CHECK(order == nullptr || !parameter.partial_gradient, "'{}' is a term of a sum in fixed order",
                parameter.name);
    if (parameter.partial_gradient) add_copies(&BucketState::partial, parameter.replicas, elements);
    if (may_drift && parameter.trained) add_copies(&BucketState::equal, parameter.replicas, elements);
  });
  if (may_drift) refuse_unequal_cuts(*groups.world);
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
  return intersect(ownership_.buckets()[bucket].owned(data_.rank()), elements);
}

// Copies are made equal by the ranks that own the same part of each.
void GradientSync::refuse_unequal_cuts(Communicator& world) const {
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
  if (all_reduce_value(world, unequal, ReduceOp::kMax) == 0) return;
  throw Error(
      ErrorKind::kConfig,
      format("parallel.uneven with more tensor ranks than KV heads and {} data ranks on GPUs: the sums over data "
             "ranks would let the copies of a KV head drift apart",
             data_.size()),
      "use a parallel.tensor that divides evenly, at most two data ranks, or device: cpu");
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
  if (order_ != nullptr) return sum_in_order(bucket);
  const Tensor& gradients = table_.flat_gradients();
  for (const Copies& part : buckets_[bucket].partial) {
    part.group->all_reduce(stream_, gradients.rows(part.elements.begin, part.elements.end), ReduceOp::kSum);
  }
  if (data_.size() == 1) return;
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  const Range own = cut.owned(data_.rank());
  wait_for(queue_, stream_);
  data_.reduce_scatter(queue_, gradients.rows(cut.elements.begin, cut.elements.end), gradients.rows(own.begin, own.end),
                       cut.counts, ReduceOp::kSum);
}

// The terms of the data ranks by the tree, then the two terms of a weight with two users.
void GradientSync::sum_in_order(size_t bucket) {
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  wait_for(queue_, stream_);
  sum_nodes(cut.elements, cut.counts);
  for (const WeightId id : table_.layout()) {
    const Weight& weight = table_.weight(id);
    if (weight.second_term < 0 || ownership_.bucket_of(id) != bucket) continue;
    std::vector<int64_t> counts;
    for (int rank = 0; rank < data_.size(); ++rank) {
      counts.push_back(intersect(cut.owned(rank), weight.elements()).size());
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
  if (data_.size() == 1) return;
  const Tensor& values = table_.flat_values();
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  const Range own = cut.owned(data_.rank());
  wait_for(queue_, stream_);
  data_.all_gather(queue_, values.rows(own.begin, own.end), values.rows(cut.elements.begin, cut.elements.end),
                   cut.counts);
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
