#include "parallel/gradient_sync.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"
#include "device/device.h"

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

RowOwnership::RowOwnership(const ParameterTable& table, int data_size, int64_t bucket_elements) : table_(table) {
  int64_t begin = 0;
  for (const WeightId id : table.layout()) {
    const int64_t end = padded_end(table.weight(id));
    if (end - begin >= bucket_elements || end == table.flat_size()) {
      buckets_.push_back({{begin, end}, {}});
      begin = end;
    }
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
  for (const Bucket& bucket : buckets_) {
    const Range own = bucket.owned(data_rank);
    for (const WeightId id : table_.layout()) {
      const Range elements = intersect(table_.weight(id).elements(), own);
      if (!elements.empty()) pieces.push_back({id, elements});
    }
  }
  return pieces;
}

GradientSync::GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
                           const Stream& stream)
    : table_(table),
      ownership_(ownership),
      data_(*groups.data),
      stream_(stream),
      queue_(data_.size() > 1 ? queue_beside(stream) : stream),
      buckets_(ownership.buckets().size()),
      bucket_of_(table.weights().size()) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const WeightId id : table.layout()) {
      if (!ownership.buckets()[b].elements.contains(table.weight(id).offset)) continue;
      bucket_of_[static_cast<size_t>(id)] = b;
      buckets_[b].users += table.weight(id).users;
    }
  }
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (!parameter.partial_gradient || parameter.replicas == nullptr || parameter.replicas->size() == 1) return;
    add_replica_sum(parameter.replicas, elements);
  });
}

// Joins neighbours of one bucket, the padding between weights too.
void GradientSync::add_replica_sum(Communicator* group, Range elements) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!ownership_.buckets()[b].elements.contains(elements.begin)) continue;
    std::vector<ReplicaSum>& sums = buckets_[b].replica_sums;
    const bool joins =
        !sums.empty() && sums.back().group == group &&
        (elements.begin == sums.back().elements.end || elements.begin == aligned(sums.back().elements.end));
    if (joins) {
      sums.back().elements.end = elements.end;
    } else {
      sums.push_back({group, elements});
    }
  }
}

void GradientSync::begin_last_micro_batch() {
  last_micro_batch_ = true;
  for (BucketState& bucket : buckets_) bucket.missing = bucket.users;
}

void GradientSync::gradient_done(WeightId id) {
  if (!last_micro_batch_) return;
  const size_t bucket = bucket_of_[static_cast<size_t>(id)];
  INVAR_CHECK(buckets_[bucket].missing > 0, "'{}' has more users than it says", table_.weight(id).name);
  if (--buckets_[bucket].missing == 0) sum(bucket);
}

void GradientSync::sum(size_t bucket) {
  buckets_[bucket].summed = true;
  const Tensor& gradients = table_.flat_gradients();
  for (const ReplicaSum& part : buckets_[bucket].replica_sums) {
    part.group->all_reduce(stream_, gradients.rows(part.elements.begin, part.elements.end), ReduceOp::kSum);
  }
  if (data_.size() == 1) return;
  const RowOwnership::Bucket& cut = ownership_.buckets()[bucket];
  const Range own = cut.owned(data_.rank());
  wait_for(queue_, stream_);
  data_.reduce_scatter(queue_, gradients.rows(cut.elements.begin, cut.elements.end), gradients.rows(own.begin, own.end),
                       cut.counts, ReduceOp::kSum);
}

void GradientSync::finish() {
  for (size_t b = buckets_.size(); b-- > 0;) {
    if (!buckets_[b].summed) sum(b);
    buckets_[b].summed = false;
  }
  last_micro_batch_ = false;
  wait_for(stream_, queue_);
}

void GradientSync::publish() {
  if (data_.size() == 1) return;
  const Tensor& values = table_.flat_values();
  for (const RowOwnership::Bucket& bucket : ownership_.buckets()) {
    const Range own = bucket.owned(data_.rank());
    data_.all_gather(stream_, values.rows(own.begin, own.end), values.rows(bucket.elements.begin, bucket.elements.end),
                     bucket.counts);
  }
}

}  // namespace invar
