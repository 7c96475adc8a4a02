#include "config/blend.h"

#include <charconv>
#include <limits>
#include <optional>
#include <sstream>

#include "core/error.h"
#include "core/shown.h"

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

Blend parse_blend(std::span<const BlendItem> items) {
  constexpr double kSmallest = 1e-12;  // far from where a share could vanish or a sum overflow
  constexpr double kLargest = 1e12;
  constexpr size_t kMostSources = 32766;
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorKind::kConfig, why,
                "write a weight before every path, such as data.blend: \"0.7 data/a 0.3 data/b\", or paths alone; "
                "paths with blanks as a list: [[0.7, \"data/my a\"], [0.3, data/b]]");
  };
  Blend blend;
  bool after_weight = false;
  for (const BlendItem& item : items) {
    const std::optional<double> number = item.may_be_weight ? number_of(item.text) : std::nullopt;
    if (number) {
      if (after_weight) refuse(format("the weight {} follows another weight", shown(item.text)));
      if (!(*number >= kSmallest && *number <= kLargest)) {
        refuse(format("the weight {} is not within {} to {}", shown(item.text), kSmallest, kLargest));
      }
      blend.weights.push_back(*number);
    } else {
      if (item.text.empty()) refuse("a path is empty");
      blend.paths.push_back(item.text);
    }
    after_weight = number.has_value();
  }
  if (after_weight) refuse("the last weight has no path");
  if (blend.paths.empty()) refuse("there is no path");
  if (!blend.weights.empty() && blend.weights.size() != blend.paths.size()) refuse("some paths have no weight");
  if (blend.paths.size() > kMostSources) {
    throw Error(ErrorKind::kConfig, format("{} sources; {} are possible", blend.paths.size(), kMostSources),
                "join some of the files");
  }
  return blend;
}

Blend parse_blend(const std::string& text) {
  std::istringstream words(text);
  std::vector<BlendItem> items;
  for (std::string word; words >> word;) items.push_back({word});
  return parse_blend(items);
}

std::string text_of(const Blend& blend) {
  std::string text;
  for (size_t i = 0; i < blend.paths.size(); ++i) {
    if (i > 0) text += ' ';
    if (!blend.weights.empty()) text += format("{} ", blend.weights[i]);
    text += blend.paths[i];
  }
  try {
    return parse_blend(text) == blend ? text : "";
  } catch (const Error&) {  // a path that looks like a weight
    return "";
  }
}

}  // namespace invar
