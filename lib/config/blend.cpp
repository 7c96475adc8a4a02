#include "config/blend.h"

#include <charconv>
#include <limits>
#include <optional>
#include <sstream>

#include "core/error.h"

namespace invar {
namespace {

// The number that a whole item is, whatever its value; nan if it is one that fp64 cannot hold.
std::optional<double> number_of(const std::string& item) {
  double value = 0.0;
  const auto parsed = std::from_chars(item.data(), item.data() + item.size(), value);
  if (parsed.ptr != item.data() + item.size() || parsed.ec == std::errc::invalid_argument) return std::nullopt;
  return parsed.ec == std::errc() ? value : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

Blend parse_blend(const std::string& text) {
  constexpr double kSmallest = 1e-12;  // far from where a share could vanish or a sum overflow
  constexpr double kLargest = 1e12;
  constexpr size_t kMostSources = 32766;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kConfig, format("data.blend = \"{}\": {}", text, why),
                "write a weight before every path, such as data.blend: \"0.7 data/a 0.3 data/b\", or paths alone");
  };
  Blend blend;
  std::istringstream items(text);
  bool after_weight = false;
  for (std::string item; items >> item;) {
    const std::optional<double> number = number_of(item);
    if (number) {
      if (after_weight) refuse(format("the weight {} follows another weight", item));
      if (!(*number >= kSmallest && *number <= kLargest)) {
        refuse(format("the weight {} is not within {} to {}", item, kSmallest, kLargest));
      }
      blend.weights.push_back(*number);
    } else {
      blend.paths.push_back(item);
    }
    after_weight = number.has_value();
  }
  if (after_weight) refuse("the last weight has no path");
  if (blend.paths.empty()) refuse("there is no path");
  if (!blend.weights.empty() && blend.weights.size() != blend.paths.size()) refuse("some paths have no weight");
  if (blend.paths.size() > kMostSources) {
    throw Error(ErrorKind::kConfig,
                format("data.blend names {} sources; {} are possible", blend.paths.size(), kMostSources),
                "join some of the files");
  }
  return blend;
}

}  // namespace invar
