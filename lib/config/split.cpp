#include "config/split.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/error.h"
#include "core/shown.h"

namespace invar {

std::array<double, 3> parse_split(const std::string& text) {
  constexpr std::string_view kNumber = "0123456789.";
  constexpr double kLargest = 1e12;  // far from where a sum could overflow
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kConfig, format("data.split = \"{}\": {}", shown(text), why),
                "write the weights of training, validation and test, such as data.split: \"969, 30, 1\"");
  };
  if (text.find_first_not_of("0123456789., ") != std::string::npos) {
    refuse("only numbers such as 969 or 0.5, commas and blanks are allowed");
  }
  std::array<double, 3> weights{};
  size_t count = 0;
  for (size_t at = text.find_first_of(kNumber); at != std::string::npos; at = text.find_first_of(kNumber, at)) {
    const size_t end = std::min(text.find_first_not_of(kNumber, at), text.size());
    const std::string word = text.substr(at, end - at);
    if (count == weights.size()) refuse("there are more than three weights");
    double& weight = weights[count++];
    const auto parsed = std::from_chars(word.data(), word.data() + word.size(), weight, std::chars_format::fixed);
    if (parsed.ec != std::errc() || parsed.ptr != word.data() + word.size()) refuse(shown(word) + " is not a number");
    if (weight > kLargest) refuse(format("{} exceeds {}", shown(word), kLargest));
    at = end;
  }
  if (weights[0] + weights[1] + weights[2] <= 0) refuse("the weights must have a positive sum");
  return weights;
}

}  // namespace invar
