#include "optim/gradient_norm.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise.h"

namespace invar {

double gradient_norm(const Stream& stream, const ParameterTable& table, const RowOwnership& ownership,
                     const ProcessGroups& groups) {
  const int data_rank = groups.data->rank();
  double squares = 0;
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (!parameter.counted()) return;
    for (const RowOwnership::Bucket& bucket : ownership.buckets()) {
      const Range own = intersect(elements, bucket.owned(data_rank));
      if (!own.empty()) squares += ops::sum_of_squares(stream, table.flat_gradients().rows(own.begin, own.end));
    }
  });
  if (table.flat_gradients().is_meta()) return 0;
  return std::sqrt(all_reduce_value(*groups.world, squares, ReduceOp::kSum));
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace invar
