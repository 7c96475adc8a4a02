#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>

#include "train/train_state.h"

namespace invar {

// Tells losses that stand out from those before them.
class SpikeDetector {
 public:
  // threshold: standard deviations above the mean; 0: none stands out.
  explicit SpikeDetector(double threshold) : threshold_(threshold) {}

  // Takes the next loss. Its z-score, (loss − mean) / standard deviation of the last kWindow losses before it, if that
  // exceeds the threshold. Nothing before there are kLeast of them. Losses that are not finite are left out.
  std::optional<double> add(double loss);

  static constexpr size_t kWindow = 100;
  static constexpr size_t kLeast = 20;

 private:
  double threshold_;
  std::deque<double> losses_;
};

// Where NaN or infinity came up in a step whose loss or gradient is not finite: the first decoder layer whose output is
// not, by another forward pass; else the head; else the weight nearest to the head whose gradient is not. For after the
// sums over ranks, with the weights untouched. Collective over the world.
std::string nonfinite_origin(TrainState& state, const ProcessGroups& groups, std::span<const Batch> batches,
                             int64_t layers, double loss);

}  // namespace invar
