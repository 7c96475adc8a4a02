#include "app/layout_matrix.h"

#include <algorithm>

#include "config/contract.h"
#include "config/validation.h"
#include "core/format.h"

namespace invar::app {
namespace {

constexpr int kRanks = 8;

bool contains(const std::vector<int>& degrees, int degree) {
  return std::find(degrees.begin(), degrees.end(), degree) != degrees.end();
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  for (const int tensor : {1, 2, 3, 4, 8}) {
    for (const bool sequence : {false, true}) {
      if (sequence && tensor == 1) continue;
      for (const int data : {1, 2, 4}) {
        if (tensor * data > kRanks) continue;
        for (const int64_t micro : {1, 2, 4}) {
          const RecomputeKind recompute = micro == 2 ? RecomputeKind::kSelective : RecomputeKind::kNone;
          layouts.push_back({tensor, sequence, data, micro, recompute});
          if (micro == 1) layouts.push_back({tensor, sequence, data, micro, RecomputeKind::kFull});
        }
      }
    }
  }
  return layouts;
}

}  // namespace

void Layout::apply_to(Config& config) const {
  config.parallel.tensor = tensor;
  config.parallel.sequence = sequence;
  config.parallel.data = data;
  config.parallel.uneven = uneven;
  config.train.micro_batch_size = micro_batch;
  config.train.recompute = recompute;
}

LayoutMatrix layout_matrix(const Config& config, int64_t batch, int64_t sequence_length) {
  const std::vector<int> even = fitting_tensor_degrees(config, false);
  const std::vector<int> uneven = fitting_tensor_degrees(config, true);
  const bool invariant = config.numerics.reduction == Reduction::kInvariant;
  LayoutMatrix matrix;
  for (Layout layout : all_layouts()) {
    layout.uneven = !contains(even, layout.tensor);
    if (layout.uneven && !contains(uneven, layout.tensor)) {
      ++matrix.left_out[format("tensor {}: this model can be cut into at most {} parts", layout.tensor, uneven.back())];
    } else if (const int64_t unit = layout.micro_batch * layout.data; batch % unit != 0) {
      ++matrix.left_out[format("micro-batch · data = {}: does not divide the batch of {}", unit, batch)];
    } else if (invariant && !begins_with_workers(layout.data, config.numerics.workers, batch)) {
      ++matrix.left_out[format("data {}: its ranks do not hold whole workers of {} in all", layout.data,
                               config.numerics.workers)];
    } else if (const int64_t tokens = layout.micro_batch * sequence_length; layout.sequence && tokens < layout.tensor) {
      ++matrix.left_out[format("sequence on: a micro-batch of {} tokens has none for some of {} ranks", tokens,
                               layout.tensor)];
    } else {
      matrix.layouts.push_back(layout);
    }
  }
  return matrix;
}

}  // namespace invar::app
