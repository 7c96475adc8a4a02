#pragma once

#include <algorithm>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/state_extent.h"
#include "core/integer.h"

namespace invar {

// How a stored rectangle is cut for checksums: strips of whole width, a few MiB each, cut into tiles. A reader of some
// rows or some columns reads the tiles that cover them, so that it verifies all that it takes and reads little more.
struct Tiling {
  int64_t rows = 1;  // of a tile
  int64_t cols = 1;

  static constexpr int64_t kStripElements = 1 << 20;  // at most, unless a row has more

  // Tensors whose columns are shared out are cut in columns too.
  static Tiling of(const Rectangle& piece, bool cut_columns) {
    constexpr int64_t kTileCols = 64;
    const int64_t width = std::max<int64_t>(1, piece.cols.size());
    return {std::clamp<int64_t>(kStripElements / width, 1, std::max<int64_t>(1, piece.rows.size())),
            cut_columns ? std::min(kTileCols, width) : width};
  }

  int64_t tiles_across(const Rectangle& piece) const { return ceil_div(piece.cols.size(), cols); }
  int64_t count(const Rectangle& piece) const { return ceil_div(piece.rows.size(), rows) * tiles_across(piece); }
};

// The sums of the tiles of one strip, which side by side are `width` columns. The strip comes in parts, in order: of
// whole rows, or of any size if it is one tile.
class StripSums {
 public:
  StripSums(int64_t width, int64_t tile_cols)
      : width_(width), tile_cols_(tile_cols), sums_(static_cast<size_t>(ceil_div(width, tile_cols))) {}

  void add(std::span<const float> part) {
    if (sums_.size() == 1) {
      sums_[0] = crc32(std::as_bytes(part), sums_[0]);
      return;
    }
    for (; !part.empty(); part = part.subspan(static_cast<size_t>(width_))) {
      for (int64_t col = 0, tile = 0; col < width_; col += tile_cols_, ++tile) {
        const int64_t cols = std::min(tile_cols_, width_ - col);
        uint32_t& sum = sums_[static_cast<size_t>(tile)];
        sum = crc32(std::as_bytes(part.subspan(static_cast<size_t>(col), static_cast<size_t>(cols))), sum);
      }
    }
  }
  const std::vector<uint32_t>& sums() const { return sums_; }

 private:
  int64_t width_;
  int64_t tile_cols_;
  std::vector<uint32_t> sums_;
};

}  // namespace invar
