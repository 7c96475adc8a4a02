#pragma once

#include <optional>

#include "ops/head_view.h"
#include "parallel/unit_cut.h"

namespace invar {

// The query and KV heads of one tensor-parallel rank. Up to Hkv ranks, a rank holds whole KV groups. Beyond, the ranks
// are dealt out to the KV heads and each holds a run of its group's query heads and a copy of the KV head.
struct HeadPartition {
  Range query_heads;            // global query heads held
  Range kv_heads;               // global KV heads held, one if replicated
  int64_t heads_per_group = 0;  // query heads held per KV head held
  bool replicated = false;      // the KV head is also held by other ranks
  int replica_color = 0;        // equal for ranks that hold the same KV heads
  Range replicas;               // these ranks
};
// leaves: see UnitCut; with leaves a rank holds whole ones (HeadCut).
HeadPartition partition_heads(int64_t query_heads, int64_t kv_heads, int64_t leaves, int tensor_size, int tensor_rank);

// Leaves of each rank in the sums over query heads, of which each KV head has `heads_per_group`; with one they are
// those of a sum over any units.
std::vector<Range> head_leaves(int64_t kv_heads, int64_t heads_per_group, int64_t leaves, int ranks);

// What one call of attention computes: some query heads of each of some KV groups that this rank holds. Neighbouring
// runs of one length of one group are groups of their own to it, which see the same keys and values.
struct HeadCall {
  Range groups;       // held ones
  Range heads;        // of each of them
  Range runs;         // of each of them
  int64_t first = 0;  // query heads of earlier calls

  int64_t query_heads() const { return groups.size() * heads.size(); }
  // Its part of a view of all query heads, or of all KV heads, of this rank.
  ops::HeadView queries(ops::HeadView view) const;
  ops::HeadView keys(ops::HeadView view) const;
  // Its part (T, query_heads()) of an f32 (T, all query heads), where calls lie one after another.
  Tensor statistics(const Tensor& all) const;
};

// The heads of an attention layer, cut over the ranks of a tensor-parallel group, and how sums over them are evaluated.
// In invariant numerics the query heads of a KV group are cut in runs (config/units.h, head_runs). A single run: leaves
// are whole groups. Else each run is a leaf, and so is what it adds to the gradients of its group's keys and values.
class HeadCut {
 public:
  // leaves = 0: fast numerics.
  HeadCut(int64_t query_heads, int64_t kv_heads, int64_t leaves, const Communicator& tensor);

  const HeadPartition& mine() const { return partitions_[rank_]; }
  // Heads of each rank in sums over all heads, where of copies the first one counts.
  std::vector<int64_t> query_heads_of_ranks() const;
  std::vector<int64_t> kv_heads_of_ranks() const;

  // The calls of attention that compute all heads of this rank, as few as there can be.
  std::vector<HeadCall> calls() const;
  // The sum of what the runs add to the gradients of their group's keys and values, over the ranks that hold it, a leaf
  // for each run; null if there is but one.
  const LeafCut* run_sum() const { return run_sum_.get(); }
  // A dim of which a group has, one after another, the rows of its query heads and of `kv_rows` heads of keys and
  // values, rows_per_head each. If runs are leaves, so are the latter together, before them, on the first of the ranks
  // that hold the group.
  CutDim dim(int64_t rows_per_head, int64_t kv_rows) const;

 private:
  std::vector<Range> held_runs() const;

  size_t rank_;
  std::vector<HeadPartition> partitions_;  // of each rank
  int64_t runs_ = 1;                       // of a group, in all
  std::vector<Range> leaves_of_;           // of each rank, of the runs of all groups
  std::optional<UnitCut> groups_;          // if a group has one run
  CutDim run_sum_;
};

}  // namespace invar
