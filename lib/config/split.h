#pragma once

#include <array>
#include <string>

namespace invar {

// The weights of training, validation and test in Megatron's split string, "969, 30, 1": each run of digits and points
// is one number, whatever commas and blanks stand between; missing ones are 0. Megatron-LM reads around all other
// characters ("9e1" as 9 and 1, "-1" as 1); here they are refused. Error{kConfig} for these, for more than three
// numbers, for a number that is none ("1.2.3") or is too large, and for weights without a positive sum.
std::array<double, 3> parse_split(const std::string& text);

}  // namespace invar
