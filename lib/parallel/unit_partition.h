#pragma once

#include <cstdint>
#include <vector>

#include "core/range.h"

namespace invar {

// Contiguous runs of `units` for `parts` ranks; the first units % parts runs are longer by one.
std::vector<Range> split_units(int64_t units, int parts);

}  // namespace invar
