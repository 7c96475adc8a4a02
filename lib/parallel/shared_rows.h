#pragma once

#include <span>
#include <vector>

#include "parallel/row_ownership.h"

namespace invar {

// The rows of these weights as blocks (without counts), which each rank that holds some of them has in one piece: the
// cuts of all replicas, of whatever width, together. Neighbours that are neighbours on every rank are one block.
// tables: the layouts of all world ranks. Error{kFault} if a replica has not all rows.
std::vector<SharedBlock> shared_rows(const Topology& topology, std::span<const ParameterTable* const> tables,
                                     std::span<const WeightId> weights);

}  // namespace invar
