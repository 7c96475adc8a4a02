#pragma once

#include <span>
#include <string>
#include <vector>

namespace invar {

// The sources of data.blend.
struct Blend {
  std::vector<std::string> paths;
  std::vector<double> weights;  // as given, one for each path; empty: each source weighs by its size

  bool empty() const { return paths.empty(); }
  bool operator==(const Blend&) const = default;
};

// One item of a blend as written.
struct BlendItem {
  std::string text;
  bool may_be_weight = true;  // if it is a number; otherwise it is a path whatever it looks like
};

// The sources among items in Megatron's order: 0.7 a 0.3 b, or paths alone. An item that is a number is a weight and
// stands before its path. Error{kConfig}, whose message is the reason alone, for items without a path, an empty path
// and weights for some paths only. Weights are 1e-12 to 1e12, each with a path, and there are at most 32766 sources
// (Megatron-LM's limit).
Blend parse_blend(std::span<const BlendItem> items);

// The same, where the items stand between blanks: "0.7 a 0.3 b". A file whose name is a number can be written ./1.
Blend parse_blend(const std::string& text);

// The text that parse_blend() reads as this blend; empty if there is none, as for a path with a blank in it.
std::string text_of(const Blend& blend);

}  // namespace invar
