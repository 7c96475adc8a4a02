#pragma once

#include <algorithm>
#include <cstdint>

namespace invar {

// Half-open interval [begin, end) of indices.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  constexpr int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(int64_t index) const { return begin <= index && index < end; }
  constexpr bool operator==(const Range&) const = default;
};

constexpr Range intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace invar
