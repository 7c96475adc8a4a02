#include "config/plan_cost.h"

#include <algorithm>

#include "config/replica_shares.h"
#include "core/integer.h"

namespace invar {

PlanCost plan_cost(const Config& config, const ReplicaPlan& plan) {
  const int64_t micro = config.train.micro_batch_size;
  const std::vector<double> speeds = replica_speeds(config, plan.widths, plan.grid_places());
  const double full_speed = config.parallel.nonuniform.speeds.empty()
                                ? 1 / modelled_time(config, config.parallel.tensor)
                                : *std::max_element(speeds.begin(), speeds.end());
  double step_time = 0;
  for (size_t replica = 0; replica < speeds.size(); ++replica) {
    const int64_t micro_batches = plan.samples[replica] / micro;
    step_time = std::max(step_time, static_cast<double>(micro_batches) / speeds[replica]);
  }
  const auto replicas = grid_replicas(config, plan);
  const int64_t batch = grid_batch(config, replicas);
  const auto time_of = [&](int64_t whole_replicas) {
    const int64_t unit = share_unit(config, batch);
    const int64_t micro_batches = ceil_div(batch / unit, whole_replicas) * unit / micro;
    return static_cast<double>(micro_batches) / full_speed;
  };
  PlanCost cost;
  cost.step_time = step_time / time_of(replicas);
  cost.throughput = static_cast<double>(plan.batch()) / static_cast<double>(batch) / cost.step_time;
  const auto whole = std::count(plan.widths.begin(), plan.widths.end(), config.parallel.tensor);
  if (whole > 0) cost.step_time_without_damaged = time_of(whole) / time_of(replicas);
  return cost;
}

}  // namespace invar
