#pragma once

#include <cstdint>
#include <string>

#include "core/range.h"

namespace invar {

// The sequences of part 0 (train), 1 (validation) or 2 (test) under Megatron's split weights, e.g. "969, 30, 1":
// cumulative shares times the number of sequences, rounded half to even. Error{kConfig} for text that parse_split()
// refuses, Error{kData} for a part without sequences.
Range split_sequences(const std::string& weights, int part, int64_t sequences);

}  // namespace invar
