#include "train/stop_control.h"

#include <cstring>

namespace invar {
namespace {

// What a rank has to say, as one number of which the largest wins: a signal's number lies above both.
constexpr int64_t kGoOn = 0;
constexpr int64_t kSteps = 1;
constexpr int64_t kMinutes = 2;
constexpr int64_t kSignal = 16;

}  // namespace

std::string StopControl::reason(Communicator& world, int64_t steps) const {
  if (config_.exit_after_steps == 0 && config_.exit_after_minutes == 0 && signal_ == nullptr) return "";  // on any rank
  int64_t mine = kGoOn;
  if (config_.exit_after_steps > 0 && steps >= config_.exit_after_steps) mine = kSteps;
  const std::chrono::duration<double, std::ratio<60>> elapsed = std::chrono::steady_clock::now() - start_;
  if (config_.exit_after_minutes > 0 && elapsed.count() >= config_.exit_after_minutes) mine = kMinutes;
  if (signal_ != nullptr && *signal_ != 0) mine = kSignal + *signal_;
  switch (const int64_t word = all_reduce_value(world, mine, ReduceOp::kMax)) {
    case kGoOn:
      return "";
    case kSteps:
      return format("train.exit_after_steps = {}", config_.exit_after_steps);
    case kMinutes:
      return format("train.exit_after_minutes = {}", config_.exit_after_minutes);
    default:
      return format("signal {}", sigabbrev_np(static_cast<int>(word - kSignal)));
  }
}

}  // namespace invar
