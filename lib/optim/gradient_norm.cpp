#include "optim/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "device/device.h"

namespace invar {

std::vector<Range> counted_ranges(const ParameterTable& table, const RowOwnership& ownership) {
  std::map<int64_t, std::pair<int64_t, bool>> runs;  // begin -> end, whether counted
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    runs[elements.begin] = {elements.end, parameter.counted()};
  });
  std::vector<Range> joined;
  for (size_t bucket = 0; bucket < ownership.buckets().size(); ++bucket) {
    for (const Range& owned : ownership.owned(bucket)) {
      bool joins = false;
      for (const auto& [begin, run] : runs) {
        const auto [end, counted] = run;
        const Range own = counted ? intersect({begin, end}, owned) : Range{};
        joins = joins && !own.empty() && own.begin == joined.back().end;
        if (joins) joined.back().end = own.end;
        if (!joins && !own.empty()) joined.push_back(own);
        joins = !own.empty();
      }
    }
  }
  return joined;
}

double gradient_norm(const Stream& stream, const Tensor& flat_gradients, const std::vector<Range>& counted,
                     Communicator& world, const Tensor& squares) {
  ops::zero(stream, squares);
  for (const Range& own : counted) {
    ops::add_sum_of_squares(stream, flat_gradients.rows(own.begin, own.end), squares);
  }
  if (squares.is_meta()) return 0;
  double total = 0;
  copy_across(stream, squares, Tensor(&total, DType::kF64, DeviceType::kCpu, {1}));
  return std::sqrt(all_reduce_value(world, total, ReduceOp::kSum));
}

std::vector<ops::RowBlock> counted_rows(const ParameterTable& table, const RowOwnership& ownership) {
  std::vector<ops::RowBlock> counted;
  for (const RowOwnership::Piece& piece : ownership.pieces()) {
    const Weight& weight = table.weight(piece.weight);
    std::vector<Range> held;
    for (const Parameter& parameter : weight.parameters) {
      if (!parameter.counted()) continue;
      for (const RowRun& run : parameter.runs) {
        const int64_t begin = weight.offset + run.local * weight.cols;
        const Range rows = intersect({begin, begin + run.global.size() * weight.cols}, piece.elements);
        if (!rows.empty()) held.push_back(rows);
      }
    }
    std::ranges::sort(held, {}, &Range::begin);
    const size_t first = counted.size();
    for (const Range& rows : held) {  // neighbours in one go
      const int64_t count = rows.size() / weight.cols;
      if (counted.size() > first && counted.back().end() == rows.begin) {
        counted.back().rows += count;
      } else {
        counted.push_back({rows.begin, count, weight.cols});
      }
    }
  }
  return counted;
}

double gradient_norm(const Stream& stream, const Tensor& flat_gradients, const std::vector<ops::RowBlock>& counted,
                     Communicator& world, const RowSquares& scratch) {
  ops::row_squares(stream, flat_gradients, counted, scratch.squares);
  ops::exact_sum(stream, scratch.squares, scratch.digits);
  if (scratch.digits.is_meta()) return 0;
  std::array<int64_t, ExactSum::kDigits> digits;
  copy_across(stream, scratch.digits, Tensor(digits.data(), DType::kI64, DeviceType::kCpu, {ExactSum::kDigits}));
  return std::sqrt(all_reduce_value(world, ExactSum::of_digits(digits)));
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace invar
