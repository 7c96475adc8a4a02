#include "data/megatron_split.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include "core/error.h"

namespace invar {
namespace {

std::array<double, 3> parse_weights(const std::string& text) {
  constexpr std::string_view kNumber = "0123456789.";
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kConfig, format("data.split \"{}\": {}", text, why),
                "write the weights of train, validation and test, e.g. \"969, 30, 1\"");
  };
  if (text.find_first_not_of("0123456789., ") != std::string::npos) refuse("only numbers and commas are allowed");
  std::array<double, 3> weights = {};
  size_t count = 0;
  for (size_t at = text.find_first_of(kNumber); at != std::string::npos; at = text.find_first_of(kNumber, at)) {
    const size_t end = std::min(text.find_first_not_of(kNumber, at), text.size());
    if (count == weights.size()) refuse("more than three weights");
    const auto parsed = std::from_chars(text.data() + at, text.data() + end, weights[count++]);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + end) refuse("a weight is not a number");
    at = end;
  }
  if (weights[0] + weights[1] + weights[2] <= 0.0) refuse("the weights must have a positive sum");
  return weights;
}

}  // namespace

Range split_sequences(const std::string& weights, int part, int64_t sequences) {
  const std::array<double, 3> weight = parse_weights(weights);
  const double sum = weight[0] + weight[1] + weight[2];
  double begin = 0.0;
  for (int i = 0; i < part; ++i) begin += weight[static_cast<size_t>(i)] / sum;
  const double end = begin + weight[static_cast<size_t>(part)] / sum;
  // nearbyint rounds half to even, as Python's round() does.
  const auto boundary = [&](double share) {
    return static_cast<int64_t>(std::nearbyint(share * static_cast<double>(sequences)));
  };
  const Range range = {boundary(begin), std::min(boundary(end), sequences)};
  if (range.empty()) {
    throw Error(ErrorKind::kData,
                format("data.split \"{}\" leaves no sequence of {} for part {} of train, validation, test", weights,
                       sequences, part + 1),
                "give that part more weight");
  }
  return range;
}

}  // namespace invar
