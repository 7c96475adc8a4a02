#include "checkpoint/state_extent.h"

#include <algorithm>
#include <new>

#include "core/error.h"
#include "core/integer.h"

namespace invar {
namespace {

// Columns that are stored as rows are moved a cache line's worth at a time.
constexpr int64_t kUnitsTogether = 16;

// to(c, r) = from(r, c) of a matrix of rows × cols, whose rows lie `from_stride` apart, those of `to` `to_stride`. A
// square at a time, so that of each cache line all is read, and written, at once.
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to, int64_t to_stride) {
  constexpr int64_t kSide = 16;
  float square[kSide][kSide];
  for (int64_t first_row = 0; first_row < rows; first_row += kSide) {
    for (int64_t first_col = 0; first_col < cols; first_col += kSide) {
      const float* source = from + first_row * from_stride + first_col;
      float* target = to + first_col * to_stride + first_row;
      const int64_t r_end = std::min(kSide, rows - first_row), c_end = std::min(kSide, cols - first_col);
      if (r_end == kSide && c_end == kSide) {
        for (int64_t r = 0; r < kSide; ++r) {
          for (int64_t c = 0; c < kSide; ++c) square[c][r] = source[r * from_stride + c];
        }
        for (int64_t c = 0; c < kSide; ++c) std::copy_n(square[c], kSide, target + c * to_stride);
        continue;
      }
      for (int64_t c = 0; c < c_end; ++c) {
        for (int64_t r = 0; r < r_end; ++r) target[c * to_stride + r] = source[r * from_stride + c];
      }
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

// Calls move(stored, at, units) for the runs of a tensor that is stored transposed, column by column: so many of them
// from `stored` on are columns of the area from its element `at` on.
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
