#include "data/megatron_split.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "config/split.h"
#include "core/error.h"

namespace invar {

Range split_sequences(const std::string& weights, int part, int64_t sequences) {
  const std::array<double, 3> weight = parse_split(weights);
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
                format("data.split = \"{}\" leaves no sequence of {} for part {} of train, validation, test", weights,
                       sequences, part + 1),
                "give that part more weight");
  }
  return range;
}

}  // namespace invar
