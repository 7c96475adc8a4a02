#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>

#include "train/step.h"

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

// Steps that changed nothing, and when they end a run. Of those with a loss or norm that is not finite it is the first
// one (train.on_nonfinite: stop) or too many in a row. Of those without counted tokens too many in a row. A step
// without counted tokens says nothing of the weights, so it neither continues nor ends a row of the others.
class LeftOutSteps {
 public:
  explicit LeftOutSteps(const Config& config) : config_(config) {}

  // Takes the next step. The error that the run should end with, if it should.
  std::optional<Error> add(const StepResult& result);
  // Why the step was left out, for a person; empty if it was not.
  std::string why(const StepResult& result) const;
  // Of the last steps that counted tokens, as many as were not finite in a row.
  int nonfinite_in_a_row() const { return nonfinite_in_a_row_; }

  static constexpr int kMostInARow = 10;  // more are not the data of a step

 private:
  const Config& config_;
  int nonfinite_in_a_row_ = 0;
  int empty_in_a_row_ = 0;
};

// Where NaN or infinity came up in a step whose loss or gradient is not finite: the first decoder layer whose output is
// not, by another forward pass; else the head; else the weight nearest to the head whose gradient is not. For after the
// sums over ranks, with the weights untouched. Collective over the world.
std::string nonfinite_origin(TrainState& state, const ProcessGroups& groups, std::span<const Batch> batches,
                             int64_t layers, double loss);

}  // namespace invar
