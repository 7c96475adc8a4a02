#pragma once

#include <string>
#include <vector>

namespace invar {

struct Blend {
  std::vector<std::string> paths;
  std::vector<double> weights;  // as given, one for each path; empty: each source weighs by its size
};

// The sources of data.blend, items between blanks: "0.7 a 0.3 b", or paths alone. An item that is a number is a weight
// and stands before its path; a file of such a name can be written ./1. Error{kConfig} for text without a path, a
// weight outside of 1e-12 to 1e12 or without a path, weights for some paths only, and more than 32766 sources
// (Megatron-LM's limit).
Blend parse_blend(const std::string& text);

}  // namespace invar
