#pragma once

#include <span>

#include "comm/communicator.h"
#include "core/input_print.h"

namespace invar {

// Collective: every rank reads the same inputs, in the same order, wherever they lie. Otherwise Error{kData} on every
// rank, which names the first input, and the lowest rank, that differ from rank 0's.
void check_inputs(std::span<const InputPrint> inputs, Communicator& world);

}  // namespace invar
