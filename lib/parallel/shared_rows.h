#pragma once

#include <span>
#include <vector>

#include "parallel/row_ownership.h"

namespace invar {

// Appends the rows of a weight as blocks (without counts), which each rank that holds some of them has in one piece:
// the cuts of all replicas, of whatever width, together. Neighbours that are neighbours on every rank are one block,
// those at the end of `blocks` too. tables: the layouts of all world ranks. Error{kFault} if a replica has not all
// rows.
void append_shared_rows(const Topology& topology, std::span<const ParameterTable* const> tables, WeightId id,
                        std::vector<SharedBlock>& blocks);

}  // namespace invar
