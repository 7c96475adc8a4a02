#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "parallel/reduction_tree.h"

namespace invar {

// How a sum over a dim that a tensor-parallel group has cut is evaluated in fixed order, as one of its ranks sees it.
struct LeafCut {
  // leaves_of: leaves of each rank; held_rows: of those of `rank`. Leaves are addable.
  LeafCut(const std::vector<Range>& leaves_of, size_t rank, std::vector<Range> held_rows, bool may_be_alone = true);

  TreePlan plan;
  LeafProgram program;      // of this rank
  std::vector<Range> rows;  // of its leaves, in their order, within the rows that it holds
  // Whether this cut alone would let each rank of a large group have one leaf. To round others for the wire saves
  // nothing.
  bool may_be_alone;
};

// Units of each of `ranks` tensor-parallel ranks, see UnitCut.
std::vector<Range> unit_runs(int64_t units, int64_t leaves, int ranks);

// Units of a dim of the model, cut over the ranks of a tensor-parallel group.
class UnitCut {
 public:
  // leaves = 0: sums over the units may be added in any order, and the runs are nearly equal. Otherwise the units are
  // min(leaves, units) leaves, nearly equal runs themselves, and ranks hold whole ones. Error{kFault} if these are
  // fewer than the ranks.
  UnitCut(int64_t units, int64_t leaves, int ranks, int rank);
  UnitCut(int64_t units, int64_t leaves, const Communicator& group)
      : UnitCut(units, leaves, group.size(), group.rank()) {}

  const std::vector<Range>& runs() const { return runs_; }  // units of each rank
  Range mine() const { return runs_[rank_]; }
  int64_t widest() const;  // units of the rank that holds most
  // For sums over rows, of which a unit has rows_per_unit, in `repeats` such dims one after another; leaves of the sum
  // are then those of the first unit leaf in each dim, those of the second, ... Null: in any order.
  std::shared_ptr<const LeafCut> leaf_cut(int64_t rows_per_unit, int64_t repeats = 1) const;

 private:
  size_t rank_;
  std::vector<Range> runs_;
  std::vector<Range> leaves_;     // units of each leaf
  std::vector<Range> leaves_of_;  // leaves of each rank
};

}  // namespace invar
