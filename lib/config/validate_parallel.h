#pragma once

#include "config/config.h"

namespace invar {

// The part of validate() that concerns the layout: degrees against the world, the model's units and the batch.
// Expects a model whose shape has been checked.
void validate_parallel(const Config& config, int world_size);

}  // namespace invar
