#include "optim/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "device/device.h"
#include "ops/elementwise.h"

namespace invar {

std::vector<Range> counted_ranges(const ParameterTable& table, const RowOwnership& ownership, int data_rank) {
  std::map<int64_t, std::pair<int64_t, bool>> runs;  // begin -> end, whether counted
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    runs[elements.begin] = {elements.end, parameter.counted()};
  });
  std::vector<Range> joined;
  for (const RowOwnership::Bucket& bucket : ownership.buckets()) {
    bool joins = false;
    for (const auto& [begin, run] : runs) {
      const auto [end, counted] = run;
      const Range own = counted ? intersect({begin, end}, bucket.owned(data_rank)) : Range{};
      joins = joins && !own.empty() && own.begin == joined.back().end;
      if (joins) joined.back().end = own.end;
      if (!joins && !own.empty()) joined.push_back(own);
      joins = !own.empty();
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

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace invar
