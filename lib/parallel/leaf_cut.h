#pragma once

#include <vector>

#include "parallel/reduction_tree.h"

namespace invar {

// How a sum over a dim that a tensor-parallel group has cut is evaluated in invariant numerics, as one rank sees it.
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

}  // namespace invar
