#include "checkpoint/state_extent.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/error.h"
#include "core/integer.h"

namespace invar {
namespace {

// Columns that are stored as rows are moved a cache line's worth at a time.
constexpr int64_t kUnitsTogether = 16;

constexpr int64_t kSide = 8;
using Lanes = float __attribute__((vector_size(kSide * sizeof(float))));

// A square of kSide rows and columns, transposed in registers: neighbours trade halves of 1, 2 and 4 lanes in turn.
void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Lanes rows[kSide], pairs[kSide], fours[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Lanes));
  for (int i = 0; i < kSide; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < kSide; i += 4) {
    for (int half = 0; half < 2; ++half) {
      const Lanes &a = pairs[i + half], &b = pairs[i + half + 2];
      fours[i + 2 * half] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * half + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < kSide / 2; ++i) {
    const Lanes low = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Lanes high = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + i * to_stride, &low, sizeof(Lanes));
    std::memcpy(to + (i + 4) * to_stride, &high, sizeof(Lanes));
  }
}

// to(c, r) = from(r, c) of a matrix of rows × cols, whose rows lie `from_stride` apart, those of `to` `to_stride`.
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to, int64_t to_stride) {
  const int64_t whole_rows = rows / kSide * kSide, whole_cols = cols / kSide * kSide;
  // Two squares at a time fill a cache line.
  for (int64_t row = 0; row < whole_rows; row += 2 * kSide) {
    const int64_t end = std::min(row + 2 * kSide, whole_rows);
    for (int64_t col = 0; col < whole_cols; col += kSide) {
      for (int64_t r = row; r < end; r += kSide) {
        transpose_square(from + r * from_stride + col, from_stride, to + col * to_stride + r, to_stride);
      }
    }
  }
  for (int64_t col = 0; col < cols; ++col) {
    for (int64_t row = col < whole_cols ? whole_rows : 0; row < rows; ++row) {
      to[col * to_stride + row] = from[row * from_stride + col];
    }
  }
}

}  // namespace

void resize_copy(std::vector<float>& copy, int64_t elements) {
  try {
    copy.resize(static_cast<size_t>(elements));
  } catch (const std::bad_alloc&) {
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
    throw Error(ErrorKind::kFault,
                format("no memory for a copy of this rank's state: {} bytes ({:.1f} GiB) beside the state itself",
                       bytes, static_cast<double>(bytes) / (1 << 30)),
                "use more ranks, or a host with more memory; on CPUs checkpoint.async: false needs no copy");
  }
}

StateExtent::StateExtent(const StateTensor& tensor, std::vector<StateRun> runs)
    : tensor_(&tensor), runs_(std::move(runs)) {
  const Range units{runs_.front().rows.begin, runs_.back().rows.end};
  if (tensor.transposed) {
    rectangle_ = {{0, tensor.rows()}, {units.begin * tensor.column_block, units.end * tensor.column_block}};
  } else {
    rectangle_ = {units, {0, tensor.cols()}};
  }
}

std::vector<std::span<float>> StateExtent::spans(Range rows) const {
  std::vector<std::span<float>> spans;
  for (const StateRun& run : runs_) {
    const Range part = intersect(run.rows, rows);
    if (part.empty()) continue;
    spans.emplace_back(run.values + (part.begin - run.rows.begin) * tensor_->cols(),
                       static_cast<size_t>(part.size() * tensor_->cols()));
  }
  return spans;
}

// Calls copy(stored, at, count): `count` neighbours in storage and in the area, there from element `at` on.
template <class Copy>
void StateExtent::for_each_piece(const Rectangle& area, Copy copy) const {
  const int64_t width = area.cols.size();
  for (const StateRun& run : runs_) {
    if (!tensor_->transposed) {
      const Range rows = intersect(run.rows, area.rows);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        copy(run.values + (row - run.rows.begin) * tensor_->cols() + area.cols.begin, (row - area.rows.begin) * width,
             width);
      }
      continue;
    }
    const int64_t block = tensor_->column_block;
    const Range units =
        intersect(run.rows, {area.cols.begin / block, ceil_div(std::max<int64_t>(0, area.cols.end), block)});
    for (int64_t first = units.begin; first < units.end; first += kUnitsTogether) {
      const int64_t end = std::min(first + kUnitsTogether, units.end);
      for (int64_t row = area.rows.begin; row < area.rows.end; ++row) {
        for (int64_t unit = first; unit < end; ++unit) {
          const Range cols = intersect(Range{unit * block, (unit + 1) * block}, area.cols);
          float* stored = run.values + ((unit - run.rows.begin) * tensor_->rows() + row) * block;
          copy(stored + cols.begin - unit * block, (row - area.rows.begin) * width + cols.begin - area.cols.begin,
               cols.size());
        }
      }
    }
  }
}

// Calls move(stored, at, units) for the runs of a tensor that is stored transposed, column by column. So many columns
// of the area, from its element `at` on, lie at `stored`.
template <class Move>
void StateExtent::for_each_transposed(const Rectangle& area, Move move) const {
  for (const StateRun& run : runs_) {
    const Range units = intersect(run.rows, area.cols);
    if (units.empty()) continue;
    move(run.values + (units.begin - run.rows.begin) * tensor_->rows() + area.rows.begin, units.begin - area.cols.begin,
         units.size());
  }
}

void StateExtent::gather(const Rectangle& area, std::span<float> out) const {
  const int64_t width = area.cols.size();
  if (tensor_->transposed && tensor_->column_block == 1) {
    for_each_transposed(area, [&](const float* stored, int64_t at, int64_t units) {
      transpose(stored, tensor_->rows(), units, area.rows.size(), out.data() + at, width);
    });
    return;
  }
  for_each_piece(area, [&](const float* stored, int64_t at, int64_t count) {
    std::copy(stored, stored + count, out.data() + at);
  });
}

void StateExtent::scatter(const Rectangle& area, std::span<const float> values) const {
  const int64_t width = area.cols.size();
  if (tensor_->transposed && tensor_->column_block == 1) {
    for_each_transposed(area, [&](float* stored, int64_t at, int64_t units) {
      transpose(values.data() + at, width, area.rows.size(), units, stored, tensor_->rows());
    });
    return;
  }
  for_each_piece(area, [&](float* stored, int64_t at, int64_t count) {
    std::copy(values.data() + at, values.data() + at + count, stored);
  });
}

std::vector<StateExtent> extents_of(const StatePart& part) {
  std::vector<StateRun> runs = part.runs;
  std::erase_if(runs, [](const StateRun& run) { return run.rows.empty(); });
  std::sort(runs.begin(), runs.end(), [](const StateRun& a, const StateRun& b) {
    return std::pair(a.tensor, a.rows.begin) < std::pair(b.tensor, b.rows.begin);
  });
  std::vector<StateExtent> extents;
  for (size_t first = 0; first < runs.size();) {
    size_t end = first + 1;
    while (end < runs.size() && runs[end].tensor == runs[first].tensor &&
           runs[end].rows.begin == runs[end - 1].rows.end) {
      ++end;
    }
    extents.emplace_back(part.tensors.at(runs[first].tensor), std::vector(runs.begin() + static_cast<int64_t>(first),
                                                                          runs.begin() + static_cast<int64_t>(end)));
    first = end;
  }
  return extents;
}

}  // namespace invar
