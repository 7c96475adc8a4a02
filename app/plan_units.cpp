#include "app/plan_units.h"

#include <algorithm>
#include <map>

#include "app/plan_invariant.h"

namespace invar::app {
namespace {

// As UnitCut counts them.
int64_t leaves_of(const Config& config) {
  return config.numerics.reduction == Reduction::kFast ? 0 : config.numerics.leaves;
}

}  // namespace

Range held_units(const Config& config, int64_t units, int width, int tensor_rank) {
  return unit_runs(units, leaves_of(config), width)[static_cast<size_t>(tensor_rank)];
}

HeadPartition held_heads(const Config& config, int64_t kv_heads, int width, int tensor_rank) {
  return partition_heads(config.model.num_attention_heads, kv_heads, leaves_of(config), width, tensor_rank);
}

std::vector<int> shown_replicas(const Config& config, const Topology& grid) {
  std::map<int, std::vector<int>> of_width;
  for (int replica = 0; replica < grid.replicas(); ++replica) of_width[grid.width(replica)].push_back(replica);
  std::vector<int> shown;
  for (const auto& [width, replicas] : of_width) shown.push_back(fullest_data_rank(config, grid, replicas));
  std::ranges::sort(shown);
  return shown;
}

std::string mib(int64_t bytes) {
  return format("{:>11.1f}", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace invar::app
