#pragma once

#include "config/config.h"

namespace invar {

// The part of validate() that concerns the section model alone: where it comes from, its shape, and what its family
// allows.
void validate_model(const Config& config);

}  // namespace invar
