#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"
#include "core/range.h"
#include "ops/cpu/threads.h"

namespace invar::ops::cpu {

// Below this many elements a second thread costs more than it gives.
inline constexpr int64_t kMinWorkPerThread = 16384;

// Runs body(Range) over [0, n) cut into contiguous pieces, one per thread; work_per_item is in elements. The body must
// give the same result for every cut, and must not throw.
template <class Body>
void parallel_for(int threads, int64_t n, int64_t work_per_item, const Body& body) {
  const int64_t worthwhile = n * std::max<int64_t>(work_per_item, 1) / kMinWorkPerThread;
  const auto pieces = static_cast<int>(std::min({static_cast<int64_t>(threads), n, worthwhile}));
  if (pieces <= 1) {
    body(Range{0, n});
    return;
  }
  run_on_threads(pieces, [&](int64_t index) { body(Range{n * index / pieces, n * (index + 1) / pieces}); });
}

// The same over columns; pieces begin at multiples of a cache line of floats.
template <class Body>
void parallel_columns(int threads, int64_t columns, int64_t work_per_column, const Body& body) {
  constexpr int64_t kLine = 16;
  parallel_for(threads, ceil_div(columns, kLine), kLine * work_per_column, [&](Range lines) {
    body(Range{lines.begin * kLine, std::min(columns, lines.end * kLine)});
  });
}

}  // namespace invar::ops::cpu
