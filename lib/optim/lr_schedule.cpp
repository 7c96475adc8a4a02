#include "optim/lr_schedule.h"

#include <numbers>

#include "core/elementary.h"

namespace invar {

double learning_rate(const ScheduleConfig& schedule, double lr, int64_t decay_steps, int64_t step) {
  const auto n = static_cast<double>(step - 1);
  const auto warmup = static_cast<double>(schedule.warmup_steps);
  const auto end = static_cast<double>(decay_steps);
  if (warmup > 0 && n <= warmup) return lr * n / warmup;
  if (schedule.kind == ScheduleKind::kConstant) return lr;
  if (n > end) return schedule.min_lr;
  double left = 1.0;  // share of lr − min_lr that remains
  switch (schedule.kind) {
    case ScheduleKind::kCosine:
      left = 0.5 * (elementary::cos(std::numbers::pi * (n - warmup) / (end - warmup)) + 1.0);
      break;
    case ScheduleKind::kLinear:
      left = 1.0 - (n - warmup) / (end - warmup);
      break;
    case ScheduleKind::kWsd: {
      const auto decay = static_cast<double>(schedule.wsd_decay_steps);
      left = n <= end - decay ? 1.0 : 1.0 - (n - (end - decay)) / decay;
      break;
    }
    case ScheduleKind::kConstant:
      break;
  }
  return schedule.min_lr + left * (lr - schedule.min_lr);
}

}  // namespace invar
