#include "parallel/leaf_cut.h"

namespace invar {

LeafCut::LeafCut(const std::vector<Range>& leaves_of, size_t rank, std::vector<Range> held_rows, bool alone)
    : plan(leaves_of.back().end, leaves_of),
      program(leaf_program(leaves_of.back().end, leaves_of[rank], LeafKind::kAddable)),
      rows(std::move(held_rows)),
      may_be_alone(alone) {}

}  // namespace invar
