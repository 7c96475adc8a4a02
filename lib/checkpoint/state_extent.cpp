#include "checkpoint/state_extent.h"

#include <algorithm>

#include "core/error.h"
#include "core/integer.h"

namespace invar {
namespace {

// Columns that are stored as rows are moved a cache line's worth at a time.
constexpr int64_t kUnitsTogether = 16;

}  // namespace

StateExtent::StateExtent(const StateTensor& tensor, std::vector<StateRun> runs)
    : tensor_(&tensor), runs_(std::move(runs)) {
  const Range units{runs_.front().rows.begin, runs_.back().rows.end};
  if (tensor.transposed) {
    rectangle_ = {{0, tensor.rows()}, {units.begin * tensor.column_block, units.end * tensor.column_block}};
  } else {
    rectangle_ = {units, {0, tensor.cols()}};
  }
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

namespace {

// Mostly one value, of a column.
void copy_values(const float* from, int64_t count, float* to) {
  if (count == 1) {
    *to = *from;
  } else {
    std::copy(from, from + count, to);
  }
}

}  // namespace

void StateExtent::gather(const Rectangle& area, std::span<float> out) const {
  for_each_piece(area,
                 [&](const float* stored, int64_t at, int64_t count) { copy_values(stored, count, out.data() + at); });
}

void StateExtent::scatter(const Rectangle& area, std::span<const float> values) const {
  for_each_piece(area,
                 [&](float* stored, int64_t at, int64_t count) { copy_values(values.data() + at, count, stored); });
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
