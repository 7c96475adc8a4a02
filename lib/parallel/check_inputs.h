#pragma once

#include <span>

#include "comm/communicator.h"
#include "core/input_print.h"

namespace invar {

// Collective: every rank reads the same inputs in the same order: file names, sizes and hashes. The folders that they
// lie in may differ. Otherwise Error{kData}, the same on every rank, which names the first input, and the lowest rank,
// that differ from rank 0's.
void check_inputs(std::span<const InputPrint> inputs, Communicator& world);

}  // namespace invar
