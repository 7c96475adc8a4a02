#pragma once

#include <cstdint>

namespace invar::ops {

// Which element of a logical tensor, counted row-major, an element (row, col) of its storage is.
struct LogicalIndex {
  int64_t first = 0;
  int64_t row_stride = 0;
  int64_t block = 1;  // columns that are neighbours in the logical tensor too
  int64_t block_stride = 0;

  constexpr int64_t at(int64_t row, int64_t col) const {
    return first + row * row_stride + col / block * block_stride + col % block;
  }
  // Of storage that begins with row `row` of this one's.
  constexpr LogicalIndex from_row(int64_t row) const {
    return {first + row * row_stride, row_stride, block, block_stride};
  }
};

}  // namespace invar::ops
