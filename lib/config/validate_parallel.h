#pragma once

#include "config/replica_plan.h"

namespace invar {

// The part of validate() that concerns the layout: degrees against the world, the model's units and the batch.
// Expects a model whose shape has been checked.
void validate_parallel(const Config& config, int launched, std::span<const HostSlot> hosts);

}  // namespace invar
