#include "parallel/gradient_sync.h"

#include <algorithm>
#include <utility>

namespace invar {

GradientSync::GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
                           const Stream& stream, const SumPolicy& sums, Arena& staging)
    : table_(table),
      ownership_(ownership),
      holders_(*groups.holders),
      exchange_(groups.exchange.get()),
      stream_(stream),
      queue_(groups.topology.replicas() > 1 ? queue_beside(stream) : stream),
      sums_(sums.over_replicas({table, ownership, groups, stream_, queue_, staging})),
      copies_(copied_rows(table, ownership, false)),
      buckets_(ownership.buckets().size()) {
  for (const WeightId id : table.layout()) buckets_[ownership.bucket_of(id)].users += table.weight(id).users;
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
  sums_->sum(bucket);
}

void GradientSync::finish() {
  for (size_t b = buckets_.size(); b-- > 0;) {
    if (!buckets_[b].summed) sum(b);
    buckets_[b].summed = false;
  }
  last_micro_batch_ = false;
  wait_for(stream_, queue_);
}

void GradientSync::publish(size_t bucket) {
  if (exchange_ == nullptr && holders_.size() == 1 && copies_[bucket].empty()) return;
  wait_for(queue_, stream_);
  if (exchange_ != nullptr) {
    exchange_values(bucket);
  } else {
    gather_values(bucket);
  }
  buckets_[bucket].published.set(queue_);
  buckets_[bucket].awaited = false;
}

// Replicas of one width: from the owners to the holders of the same shard, then to the copies in each replica.
void GradientSync::gather_values(size_t bucket) {
  const Tensor& values = table_.flat_values();
  if (holders_.size() > 1) {
    const Range elements = ownership_.buckets()[bucket].elements;
    const std::vector<Range> summed = ownership_.summed(bucket);
    const Range own = summed.empty() ? Range{} : summed.front();
    holders_.all_gather(queue_, values.rows(own.begin, own.end), values.rows(elements.begin, elements.end),
                        owned_counts(ownership_, bucket));
  }
  for (const CopiedRows& copies : copies_[bucket]) {
    copies.group->broadcast(queue_, values.rows(copies.elements.begin, copies.elements.end), 0);
  }
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
        for (int from = 0; from < static_cast<int>(block.holders.size()); ++from) {
          if (from == to_replica || block.owned(from).empty()) continue;
          receives.push_back({part(to.begin, from), block.holders[static_cast<size_t>(from)].world_rank});
        }
      } else if (place >= 0 && !own.empty()) {
        sends.push_back({own, to.world_rank});
      }
    };
    for (int replica = 0; replica < static_cast<int>(block.holders.size()); ++replica) {
      hand_on(block.holders[static_cast<size_t>(replica)], replica);
    }
    for (const SharedBlock::Place& copy : block.copies) hand_on(copy, -1);
  }
  exchange_->exchange(queue_, sends, receives);
}

void GradientSync::await_values(WeightId id) {
  BucketState& bucket = buckets_[ownership_.bucket_of(id)];
  if (!std::exchange(bucket.awaited, true)) bucket.published.hold(stream_);
}

void GradientSync::await_values() const {
  for (const BucketState& bucket : buckets_) bucket.published.hold(stream_);
}

}  // namespace invar
