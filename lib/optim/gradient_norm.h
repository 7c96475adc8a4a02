#pragma once

#include "parallel/gradient_sync.h"

namespace invar {

// The ranges of the flat gradients whose squares a data rank adds, neighbours joined: of every element of the model one
// copy on one rank.
std::vector<Range> counted_ranges(const ParameterTable& table, const RowOwnership& ownership, int data_rank);

// Global L2 norm, in fp64, of synchronised gradients, of which this rank counts the given ranges. squares f64 (1):
// scratch. Waits for the device. Collective over the world.
double gradient_norm(const Stream& stream, const Tensor& flat_gradients, const std::vector<Range>& counted,
                     Communicator& world, const Tensor& squares);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
double clip_coefficient(double norm, double max_norm);

}  // namespace invar
