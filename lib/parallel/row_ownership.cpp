#include "parallel/row_ownership.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"
#include "parallel/shared_rows.h"

namespace invar {
namespace {

// The row boundary of the block nearest to `target`.
int64_t nearest_row(const ParameterTable& table, const SharedBlock& block, int64_t target) {
  for (size_t i = 0; i < block.parts.size(); ++i) {
    const SharedBlock::Part& part = block.parts[i];
    const int64_t padded_end = i + 1 < block.parts.size() ? block.parts[i + 1].begin : block.elements;
    if (target >= padded_end) continue;
    const int64_t cols = table.weight(part.weight).cols;
    const int64_t row = std::min(part.elements / cols, (target - part.begin + cols / 2) / cols);
    return row * cols == part.elements ? padded_end : part.begin + row * cols;
  }
  return block.elements;
}

// Cuts blocks in turn, in proportion to the shares of the replicas: what an owner gets of one beyond its share, as rows
// stay whole, it does without in the next ones.
class BlockCutter {
 public:
  BlockCutter(const ParameterTable& table, std::span<const int> shares, int owners)
      : table_(table), shares_before_{0}, owed_(static_cast<size_t>(owners), 0) {
    for (const int share : shares) shares_before_.push_back(shares_before_.back() + share);
  }

  void cut(SharedBlock& block) {
    const size_t replicas = shares_before_.size() - 1;
    int64_t owed = 0;
    for (size_t replica = 0; replica < replicas; ++replica) {
      owed_to(block, replica) += first_shares(block.elements, replica + 1) - first_shares(block.elements, replica);
      owed += owed_to(block, replica);
    }
    const int64_t left_owed = owed - block.elements;  // after this block, to all its owners in proportion
    owed = 0;
    int64_t begin = 0;
    for (size_t replica = 0; replica < replicas; ++replica) {
      owed += owed_to(block, replica);
      const int64_t target = std::max(owed - first_shares(left_owed, replica + 1), begin);
      const int64_t end = std::max(nearest_row(table_, block, target), begin);
      block.counts.push_back(end - begin);
      owed_to(block, replica) -= block.counts.back();
      begin = end;
    }
  }

 private:
  int64_t first_shares(int64_t elements, size_t replicas) const {
    return elements * shares_before_[replicas] / shares_before_.back();
  }
  int64_t& owed_to(const SharedBlock& block, size_t replica) {
    return owed_[block.holders.empty() ? replica : static_cast<size_t>(block.holders[replica].world_rank)];
  }

  const ParameterTable& table_;
  std::vector<int64_t> shares_before_;  // each replica, and behind the last one
  std::vector<int64_t> owed_;           // elements, to each owner
};

int64_t padded_end(const Weight& weight) {
  return round_up(weight.elements().end, ParameterTable::kAlignment);
}

}  // namespace

Range SharedBlock::owned(int replica) const {
  const int64_t begin = std::accumulate(counts.begin(), counts.begin() + replica, int64_t{0});
  return {begin, begin + counts[static_cast<size_t>(replica)]};
}

RowOwnership::RowOwnership(const ParameterTable& table, int replicas, int replica, int64_t bucket_elements)
    : replica_(replica), bucket_of_(table.weights().size()) {
  cut_buckets(table, bucket_elements);
  const std::vector<int> shares(static_cast<size_t>(replicas), 1);
  for (Bucket& bucket : buckets_) {
    SharedBlock block;
    block.elements = bucket.elements.size();
    for (const WeightId id : table.layout()) {
      const Weight& weight = table.weight(id);
      if (!bucket.elements.contains(weight.offset)) continue;
      block.parts.push_back({id, weight.offset - bucket.elements.begin, weight.elements().size()});
    }
    BlockCutter(table, shares, replicas).cut(block);
    bucket.blocks.push_back(std::move(block));
  }
  find_owned(table);
}

RowOwnership::RowOwnership(const Topology& topology, std::span<const ParameterTable* const> tables, int world_rank,
                           const ParameterTable& table, int64_t bucket_elements)
    : replica_(topology.replica_of(world_rank)), world_rank_(world_rank), bucket_of_(tables.front()->weights().size()) {
  cut_buckets(table, bucket_elements);
  std::vector<std::vector<WeightId>> weights(buckets_.size());
  for (const WeightId id : table.layout()) weights[bucket_of(id)].push_back(id);
  for (size_t b = 0; b < buckets_.size(); ++b) buckets_[b].blocks = shared_rows(topology, tables, weights[b]);
  std::vector<int> shares;
  for (int replica = 0; replica < topology.replicas(); ++replica) shares.push_back(topology.width(replica));
  BlockCutter cutter(table, shares, topology.world());
  for (Bucket& bucket : buckets_) {
    for (SharedBlock& block : bucket.blocks) cutter.cut(block);
  }
  find_owned(table);
}

void RowOwnership::cut_buckets(const ParameterTable& table, int64_t bucket_elements) {
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
}

int64_t RowOwnership::place(const Bucket& bucket, const SharedBlock& block) const {
  if (block.holders.empty()) return bucket.elements.begin;
  const SharedBlock::Place& holder = block.holders[static_cast<size_t>(replica_)];
  return holder.world_rank == world_rank_ ? holder.begin : -1;
}

std::vector<Range> RowOwnership::summed(size_t bucket) const {
  std::vector<Range> ranges;
  for (const SharedBlock& block : buckets_[bucket].blocks) {
    const int64_t begin = place(buckets_[bucket], block);
    const Range own = block.owned(replica_);
    if (begin >= 0 && !own.empty()) ranges.push_back({begin + own.begin, begin + own.end});
  }
  return ranges;
}

void RowOwnership::find_owned(const ParameterTable& table) {
  size_t number = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const SharedBlock& block : buckets_[b].blocks) {
      ++number;
      const int64_t begin = place(buckets_[b], block);
      if (begin < 0) continue;
      const Range own = block.owned(replica_);
      for (const SharedBlock::Part& part : block.parts) {
        const Range rows = intersect({part.begin, part.begin + part.elements}, own);
        if (!rows.empty()) add_owned(table, part.weight, {begin + rows.begin, begin + rows.end}, b, number);
      }
    }
  }
}

// Copies that another rank owns part a piece from the next one.
void RowOwnership::add_owned(const ParameterTable& table, WeightId id, Range elements, size_t bucket, size_t block) {
  const Weight& weight = table.weight(id);
  std::vector<OwnedRows> held;
  for (const Parameter& parameter : weight.parameters) {
    for (const RowRun& run : parameter.runs) {
      const int64_t begin = weight.offset + run.local * weight.cols;
      const Range own = intersect({begin, begin + run.global.size() * weight.cols}, elements);
      if (own.empty()) continue;
      const int64_t first = run.global.begin + (own.begin - begin) / weight.cols;
      held.push_back({id, &parameter, {first, first + own.size() / weight.cols}, own, 0, block});
    }
  }
  std::ranges::sort(held, {}, [](const OwnedRows& rows) { return rows.elements.begin; });
  int64_t next = elements.begin;
  const auto add_piece = [&](int64_t end) {
    if (next < end) pieces_.push_back({id, {next, end}, bucket});
  };
  for (OwnedRows& rows : held) {
    if (rows.parameter->counted()) {
      rows.piece = pieces_.size();
      owned_rows_.push_back(rows);
      continue;
    }
    add_piece(rows.elements.begin);
    next = rows.elements.end;
  }
  add_piece(elements.end);
}

}  // namespace invar
