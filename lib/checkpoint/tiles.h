#pragma once

#include <algorithm>

#include "checkpoint/state_extent.h"
#include "core/integer.h"

namespace invar {

// How a stored rectangle is cut for checksums: strips of whole width, a few MiB each, cut into tiles. A reader of some
// rows or some columns reads the tiles that cover them, so that it verifies all that it takes and reads little more.
struct Tiling {
  int64_t rows = 1;  // of a tile
  int64_t cols = 1;

  // Tensors whose columns are shared out are cut in columns too.
  static Tiling of(const Rectangle& piece, bool cut_columns) {
    constexpr int64_t kStripElements = 1 << 20;
    constexpr int64_t kTileCols = 64;
    const int64_t width = std::max<int64_t>(1, piece.cols.size());
    return {std::clamp<int64_t>(kStripElements / width, 1, std::max<int64_t>(1, piece.rows.size())),
            cut_columns ? std::min(kTileCols, width) : width};
  }

  int64_t tiles_across(const Rectangle& piece) const { return ceil_div(piece.cols.size(), cols); }
  int64_t count(const Rectangle& piece) const { return ceil_div(piece.rows.size(), rows) * tiles_across(piece); }
};

}  // namespace invar
