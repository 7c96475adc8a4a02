#pragma once

#include <optional>

#include "config/replica_plan.h"

namespace invar {

// What a plan is expected to cost, by the speeds that its batch was shared by (replica_shares.h), communication not
// counted. All are relative to the whole grid, which shares the batch of the config equally.
struct PlanCost {
  double step_time = 1;   // of a step
  double throughput = 1;  // samples per unit of time
  // If instead every replica that is not of full width were left out, and the others shared the whole batch; none if
  // there is no other.
  std::optional<double> step_time_without_damaged;
};
PlanCost plan_cost(const Config& config, const ReplicaPlan& plan);

}  // namespace invar
