#include "parallel/head_cut.h"

#include <algorithm>

#include "config/units.h"
#include "parallel/leaf_cut.h"
#include "parallel/unit_partition.h"

namespace invar {

HeadPartition partition_heads(int64_t query_heads, int64_t kv_heads, int64_t leaves, int tensor_size, int tensor_rank) {
  const int64_t group = query_heads / kv_heads;
  HeadPartition part;
  if (tensor_size <= kv_heads) {
    const Range held = unit_runs(kv_heads, leaves, tensor_size)[static_cast<size_t>(tensor_rank)];
    part.heads_per_group = group;
    part.kv_heads = held;
    part.query_heads = {held.begin * group, held.end * group};
    part.replica_color = tensor_rank;
    part.replicas = {tensor_rank, tensor_rank + 1};
    return part;
  }
  const auto ranks_of_head = split_units(tensor_size, static_cast<int>(kv_heads));
  int head = 0;
  while (!ranks_of_head[static_cast<size_t>(head)].contains(tensor_rank)) ++head;
  const Range ranks = ranks_of_head[static_cast<size_t>(head)];
  const int64_t runs = leaves == 0 ? 0 : head_runs(group, kv_heads, leaves);
  const Range run =
      unit_runs(group, runs, static_cast<int>(ranks.size()))[static_cast<size_t>(tensor_rank - ranks.begin)];
  part.kv_heads = {head, head + 1};
  part.query_heads = {head * group + run.begin, head * group + run.end};
  part.heads_per_group = run.size();
  part.replicated = ranks.size() > 1;
  part.replica_color = head;
  part.replicas = ranks;
  return part;
}

std::vector<Range> head_leaves(int64_t kv_heads, int64_t heads_per_group, int64_t leaves, int ranks) {
  const int64_t runs = head_runs(heads_per_group, kv_heads, leaves);
  std::vector<Range> held;
  if (ranks <= kv_heads) {
    for (const Range& groups : choose_runs(std::min(leaves, kv_heads), ranks)) {
      held.push_back({groups.begin * runs, groups.end * runs});
    }
    return held;
  }
  for (const Range& of_head : split_units(ranks, static_cast<int>(kv_heads))) {
    const int64_t first = held.empty() ? 0 : held.back().end;
    for (const Range& run : choose_runs(runs, static_cast<int>(of_head.size()))) {
      held.push_back({first + run.begin, first + run.end});
    }
  }
  return held;
}

HeadCut::HeadCut(int64_t query_heads, int64_t kv_heads, int64_t leaves, const Communicator& tensor)
    : rank_(static_cast<size_t>(tensor.rank())) {
  for (int rank = 0; rank < tensor.size(); ++rank) {
    partitions_.push_back(partition_heads(query_heads, kv_heads, leaves, tensor.size(), rank));
  }
  if (leaves == 0) return;
  const int64_t group = query_heads / kv_heads;
  const int64_t runs = head_runs(group, kv_heads, leaves);
  if (runs == 1) {
    groups_.emplace(kv_heads, leaves, tensor);
    return;
  }
  leaves_of_ = head_leaves(kv_heads, group, leaves, tensor.size());
  runs_ = runs;
  const Range ranks = mine().replicas;
  run_sum_ = UnitCut(group, runs, static_cast<int>(ranks.size()), static_cast<int>(tensor.rank() - ranks.begin)).dim(1);
}

std::vector<int64_t> HeadCut::query_heads_of_ranks() const {
  std::vector<int64_t> heads;
  for (const HeadPartition& part : partitions_) heads.push_back(part.query_heads.size());
  return heads;
}

std::vector<int64_t> HeadCut::kv_heads_of_ranks() const {
  std::vector<int64_t> heads;
  for (size_t rank = 0; rank < partitions_.size(); ++rank) {
    const HeadPartition& part = partitions_[rank];
    heads.push_back(part.replicas.begin == static_cast<int64_t>(rank) ? part.kv_heads.size() : 0);
  }
  return heads;
}

// Of each held group, as ranges of its held heads.
std::vector<Range> HeadCut::held_runs() const {
  return run_sum_ == nullptr ? std::vector<Range>{{0, mine().heads_per_group}} : run_sum_->rows;
}

// One run of all groups a call, or all neighbouring runs of one length of one group: whichever takes fewer.
std::vector<HeadCall> HeadCut::calls() const {
  const std::vector<Range> runs = held_runs();
  const int64_t groups = mine().kv_heads.size();
  std::vector<Range> stretches;  // of runs of one length
  for (size_t run = 0; run < runs.size(); ++run) {
    const auto end = static_cast<int64_t>(run) + 1;
    if (run == 0 || runs[run].size() != runs[run - 1].size()) stretches.push_back({end - 1, end});
    stretches.back().end = end;
  }
  std::vector<HeadCall> calls;
  int64_t first = 0;
  const auto add = [&](Range held, Range of_runs) {
    const Range heads{runs[static_cast<size_t>(of_runs.begin)].begin, runs[static_cast<size_t>(of_runs.end) - 1].end};
    calls.push_back({held, heads, of_runs, first});
    first += calls.back().query_heads();
  };
  if (std::ssize(runs) <= groups * std::ssize(stretches)) {
    for (int64_t run = 0; run < std::ssize(runs); ++run) add({0, groups}, {run, run + 1});
  } else {
    for (int64_t group = 0; group < groups; ++group) {
      for (const Range& stretch : stretches) add({group, group + 1}, stretch);
    }
  }
  return calls;
}

// A group for each of its runs.
ops::HeadView HeadCall::queries(ops::HeadView view) const {
  view.offset += groups.begin * view.group_stride + heads.begin * view.head_dim;
  view.groups = groups.size() * runs.size();
  view.heads_per_group = heads.size() / runs.size();
  if (runs.size() > 1) view.group_stride = view.heads_per_group * view.head_dim;
  return view;
}

ops::HeadView HeadCall::keys(ops::HeadView view) const {
  view.offset += groups.begin * view.group_stride;
  view.groups = groups.size() * runs.size();
  if (runs.size() > 1) view.group_stride = 0;
  return view;
}

Tensor HeadCall::statistics(const Tensor& all) const {
  const int64_t tokens = all.dim(0), own = query_heads();
  return all.view({all.numel()}).rows(tokens * first, tokens * (first + own)).view({tokens, own});
}

CutDim HeadCut::dim(int64_t rows_per_head, int64_t kv_rows) const {
  const int64_t group_rows = (mine().heads_per_group + kv_rows) * rows_per_head;
  if (groups_) return groups_->dim(group_rows);
  if (run_sum_ == nullptr) return nullptr;
  const int64_t extra = kv_rows > 0 ? 1 : 0;
  const auto place = [&](int64_t run) {  // of its leaf, or of its group's first
    return run / runs_ * (runs_ + extra) + (run % runs_ == 0 ? 0 : run % runs_ + extra);
  };
  std::vector<Range> leaves_of;
  for (const Range& held : leaves_of_) leaves_of.push_back({place(held.begin), place(held.end)});
  std::vector<Range> rows;
  const bool first = mine().replicas.begin == static_cast<int64_t>(rank_);
  for (int64_t group = 0; group < mine().kv_heads.size(); ++group) {
    const int64_t begin = group * group_rows;
    if (extra > 0 && first) rows.push_back({begin + mine().heads_per_group * rows_per_head, begin + group_rows});
    for (const Range& run : run_sum_->rows) {
      rows.push_back({begin + run.begin * rows_per_head, begin + run.end * rows_per_head});
    }
  }
  return std::make_shared<const LeafCut>(leaves_of, rank_, std::move(rows), extra == 0);
}

}  // namespace invar
