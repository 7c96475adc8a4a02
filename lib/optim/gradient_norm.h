#pragma once

#include "parallel/gradient_sync.h"

namespace invar {

// Global L2 norm of the synchronised gradients, in fp64: each logical element once, whatever copies there are.
// squares f64 (1): scratch. Waits for the device. Collective over the world.
double gradient_norm(const Stream& stream, const ParameterTable& table, const RowOwnership& ownership,
                     const ProcessGroups& groups, const Tensor& squares);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
double clip_coefficient(double norm, double max_norm);

}  // namespace invar
