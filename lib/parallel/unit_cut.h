#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/range.h"

namespace invar {

struct LeafCut;
// A dim that the tensor-parallel group has cut, as sums over it see it. Layers hand it to SumPolicy, which alone looks
// inside; null in fast numerics.
using CutDim = std::shared_ptr<const LeafCut>;

// Units of each of `ranks` tensor-parallel ranks, see UnitCut.
std::vector<Range> unit_runs(int64_t units, int64_t leaves, int ranks);

// Units of a dim of the model, cut over the ranks of a tensor-parallel group.
class UnitCut {
 public:
  // leaves = 0: fast numerics, where the runs are nearly equal. Otherwise the units are
  // min(leaves, units) leaves, nearly equal runs themselves, and ranks hold whole ones. Error{kFault} if these are
  // fewer than the ranks.
  UnitCut(int64_t units, int64_t leaves, int ranks, int rank);
  UnitCut(int64_t units, int64_t leaves, const Communicator& group)
      : UnitCut(units, leaves, group.size(), group.rank()) {}

  const std::vector<Range>& runs() const { return runs_; }  // units of each rank
  Range mine() const { return runs_[rank_]; }
  int64_t widest() const;  // units of the rank that holds most
  // A dim of rows_per_unit rows for each unit, or `repeats` such dims one after another. The leaves of a sum over them
  // are those of the first unit leaf in each dim, those of the second, and so on.
  CutDim dim(int64_t rows_per_unit, int64_t repeats = 1) const;

 private:
  size_t rank_;
  std::vector<Range> runs_;
  std::vector<Range> leaves_;     // units of each leaf
  std::vector<Range> leaves_of_;  // leaves of each rank
};

}  // namespace invar
