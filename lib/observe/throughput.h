#pragma once

#include <cstdint>

namespace invar {

// Speed and time left, from the duration of each step.
class Throughput {
 public:
  Throughput(double flops_per_step, int devices) : flops_per_step_(flops_per_step), devices_(devices) {}

  // The step that just ended: wall time, tokens over all ranks.
  void record(double seconds, int64_t tokens);

  // Of the last step; 0 before the first.
  double tokens_per_s() const;
  double tflops_per_device() const;

  // By an exponential average of the step times. The first step is left out: it pays for warm-up. NaN until there is a
  // second one; then 0 for no steps left.
  double seconds_left(int64_t steps_left) const;

 private:
  double flops_per_step_;
  int devices_;
  int64_t steps_ = 0;
  int64_t tokens_ = 0;
  double seconds_ = 0;
  double average_seconds_ = 0;
};

}  // namespace invar
