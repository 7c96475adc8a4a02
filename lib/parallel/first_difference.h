#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/communicator.h"

namespace invar {

// Index and rank of the first of `values` in which a rank differs from rank 0.
struct Difference {
  int64_t index;
  int rank;
};

// The same on every rank; nothing if all ranks have the same values. They must have equally many. Collective.
std::optional<Difference> first_difference(const std::vector<uint64_t>& values, Communicator& world);

}  // namespace invar
