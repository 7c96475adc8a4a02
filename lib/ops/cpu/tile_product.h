#pragma once

#include <algorithm>
#include <vector>

#include "core/integer.h"
#include "core/range.h"
#include "ops/cpu/vector_math.h"

// Products of matrices that fit in a core's second-level cache, as sums of panels held in registers.
namespace invar::ops::cpu {

constexpr int64_t kPanelRows = 6;  // 6 × 16 sums fill 12 of the 16 registers of AVX2
constexpr int64_t kPanelColumns = 16;

// A row-major fp32 matrix in scratch memory, zero at first. A row takes an odd number of cache lines, so that the
// lines of one column spread over all sets of the cache; rows and columns are padded to whole panels.
class Tile {
 public:
  Tile(int64_t rows, int64_t columns)
      : stride_((ceil_div(columns, kPanelColumns) | 1) * kPanelColumns),
        lines_(static_cast<size_t>(round_up(rows, kPanelRows) * stride_ / kPanelColumns)) {}

  int64_t stride() const { return stride_; }
  float* row(int64_t index) { return lines_.data()->values + index * stride_; }
  const float* row(int64_t index) const { return lines_.data()->values + index * stride_; }

 private:
  struct alignas(64) Line {
    float values[kPanelColumns] = {};
  };
  int64_t stride_;
  std::vector<Line> lines_;
};

// The left factor of a product: a tile (plain), or the transpose of one.
struct LeftFactor {
  const float* data;
  int64_t row_stride;
  int64_t term_stride;

  static LeftFactor plain(const Tile& tile) { return {tile.row(0), tile.stride(), 1}; }
  static LeftFactor transposed(const Tile& tile) { return {tile.row(0), 1, tile.stride()}; }
};

// c (6, 16) = [c +] Σ a(i, term)·b(term, j): per element one chain of fused multiply-adds over ascending terms.
inline void panel_product(const float* a, int64_t a_row, int64_t a_term, const float* b, int64_t b_stride,
                          int64_t terms, float* c, int64_t c_stride, bool add) {
  Float8 sum[kPanelRows][2];
#pragma GCC unroll 6
  for (int i = 0; i < kPanelRows; ++i) {
    sum[i][0] = add ? load8(c + i * c_stride) : Float8{};
    sum[i][1] = add ? load8(c + i * c_stride + 8) : Float8{};
  }
  for (int64_t term = 0; term < terms; ++term) {
    const Float8 left = load8(b);
    const Float8 right = load8(b + 8);
#pragma GCC unroll 6
    for (int i = 0; i < kPanelRows; ++i) {
      const Float8 factor = broadcast(a[i * a_row]);
      sum[i][0] = fma(factor, left, sum[i][0]);
      sum[i][1] = fma(factor, right, sum[i][1]);
    }
    a += a_term;
    b += b_stride;
  }
#pragma GCC unroll 6
  for (int i = 0; i < kPanelRows; ++i) {
    store8(c + i * c_stride, sum[i][0]);
    store8(c + i * c_stride + 8, sum[i][1]);
  }
}

// c (rows, columns) = [c +] a · b, panel by panel. terms_of(rows, columns) gives the range of terms that a panel sums;
// a panel without terms is left alone. Panels reach past `rows` and `columns` into the padding. c's rows begin at
// c_first_row.
template <class TermsOf>
void tile_product(int64_t rows, int64_t columns, LeftFactor a, const Tile& b, Tile& c, bool add, TermsOf terms_of,
                  int64_t c_first_row = 0) {
  for (int64_t column = 0; column < columns; column += kPanelColumns) {
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      const Range terms = terms_of(Range{row, std::min(row + kPanelRows, rows)},
                                   Range{column, std::min(column + kPanelColumns, columns)});
      if (terms.empty()) continue;
      panel_product(a.data + row * a.row_stride + terms.begin * a.term_stride, a.row_stride, a.term_stride,
                    b.row(terms.begin) + column, b.stride(), terms.size(), c.row(c_first_row + row) + column,
                    c.stride(), add);
    }
  }
}

}  // namespace invar::ops::cpu
