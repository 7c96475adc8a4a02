#include "parallel/gradient_sync.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"

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

GradientSync::GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups)
    : table_(table), ownership_(ownership), data_(*groups.data) {
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (!parameter.partial_gradient || parameter.replicas == nullptr || parameter.replicas->size() == 1) return;
    if (!replica_sums_.empty()) {
      ReplicaSum& last = replica_sums_.back();
      const bool adjacent = elements.begin == last.elements.end || elements.begin == aligned(last.elements.end);
      if (last.group == parameter.replicas && adjacent) {
        last.elements.end = elements.end;
        return;
      }
    }
    replica_sums_.push_back({parameter.replicas, elements});
  });
}

void GradientSync::finish(const Stream& stream) {
  const Tensor& gradients = table_.flat_gradients();
  for (const ReplicaSum& sum : replica_sums_) {
    sum.group->all_reduce(stream, gradients.rows(sum.elements.begin, sum.elements.end), ReduceOp::kSum);
  }
  if (data_.size() == 1) return;
  for (const RowOwnership::Bucket& bucket : ownership_.buckets()) {
    const Range own = bucket.owned(data_.rank());
    data_.reduce_scatter(stream, gradients.rows(bucket.elements.begin, bucket.elements.end),
                         gradients.rows(own.begin, own.end), bucket.counts, ReduceOp::kSum);
  }
}

void GradientSync::publish(const Stream& stream) {
  if (data_.size() == 1) return;
  const Tensor& values = table_.flat_values();
  for (const RowOwnership::Bucket& bucket : ownership_.buckets()) {
    const Range own = bucket.owned(data_.rank());
    data_.all_gather(stream, values.rows(own.begin, own.end), values.rows(bucket.elements.begin, bucket.elements.end),
                     bucket.counts);
  }
}

}  // namespace invar
