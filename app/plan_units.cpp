#include "app/plan_units.h"

#include <set>

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
  if (grid.uniform()) return {fullest_data_rank(config, grid)};
  std::vector<int> shown;
  std::set<int> widths;
  for (int replica = 0; replica < grid.data; ++replica) {
    if (widths.insert(grid.width(replica)).second) shown.push_back(replica);
  }
  return shown;
}

std::string mib(int64_t bytes) {
  return format("{:>11.1f}", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace invar::app
