#include "observe/throughput.h"

#include <limits>

namespace invar {

void Throughput::record(double seconds, int64_t tokens) {
  constexpr double kWeight = 0.1;  // of the newest step
  seconds_ = seconds;
  tokens_ = tokens;
  ++steps_;
  if (steps_ <= 2) {
    average_seconds_ = seconds;
  } else {
    average_seconds_ += kWeight * (seconds - average_seconds_);
  }
}

double Throughput::tokens_per_s() const {
  return seconds_ > 0 ? static_cast<double>(tokens_) / seconds_ : 0;
}

double Throughput::tflops_per_device() const {
  return seconds_ > 0 ? flops_per_step_ / (seconds_ * 1e12 * devices_) : 0;
}

double Throughput::seconds_left(int64_t steps_left) const {
  if (steps_ < 2) return std::numeric_limits<double>::quiet_NaN();
  return average_seconds_ * static_cast<double>(steps_left);
}

}  // namespace invar
