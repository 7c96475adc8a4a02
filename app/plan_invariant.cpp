#include "app/plan_invariant.h"

#include <algorithm>
#include <set>

#include "app/console.h"
#include "config/resolved.h"
#include "config/suggest.h"
#include "config/validation.h"
#include "parallel/head_cut.h"
#include "parallel/worker_order.h"
#include "train/run_contract.h"

namespace invar::app {
namespace {

// Leaves of every rank, and the nodes that they come to: "3 3 2 (2 2 1 nodes)".
std::string shares(int64_t leaves, const std::vector<Range>& runs) {
  std::string held;
  std::string nodes;
  for (const Range& run : runs) {
    held += format("{} ", run.size());
    nodes += format("{} ", cover(leaves, run).size());
  }
  return format("{}({}nodes)", held, nodes);
}

std::string contract_line(const Config& config, DeviceType device) {
  if (device == DeviceType::kCuda && cuda_device_count() == 0) {
    return "depends on the architecture of the GPUs; none is here";
  }
  return run_contract(config, device, 0)->describe();
}

Range workers_of_replica(const Config& config, const Topology& grid, int replica) {
  const int64_t batch = global_batch_size(config, grid.world());
  return workers_within(grid.samples_of(batch, replica), config.numerics.workers, batch);
}

SumCounts sums_of_replica(const Config& config, const Topology& grid, int replica) {
  const int64_t batch = global_batch_size(config, grid.world());
  return count_sums(config.numerics.workers, batch, grid.samples_of(batch, replica), config.train.micro_batch_size);
}

void print_workers(const Config& config, const Topology& grid) {
  const int64_t workers = config.numerics.workers;
  const int64_t batch = global_batch_size(config, grid.world());
  std::vector<Range> runs;
  int buffers = 0;
  for (int replica = 0; replica < grid.replicas(); ++replica) {
    runs.push_back(workers_of_replica(config, grid, replica));
    buffers = std::max(buffers, sums_of_replica(config, grid, replica).kept);
  }
  print_line(format("  {:<36} {:>6} {:>7}  {}", "samples, by workers", batch, workers, shares(workers, runs)));
  print_line(format("  gradient buffers in use: at most {} a data rank", buffers));
}

}  // namespace

int fullest_data_rank(const Config& config, const Topology& grid, std::span<const int> replicas) {
  if (config.numerics.reduction == Reduction::kFast) return replicas.front();
  return *std::ranges::max_element(replicas, {}, [&](int replica) { return sums_of_replica(config, grid, replica); });
}

void print_invariant(const Config& config, const Topology& grid, DeviceType device) {
  const int64_t batch = global_batch_size(config, grid.world());
  const std::vector<int> widths = grid.uniform() ? std::vector<int>{grid.tensor} : grid.widths;
  print_line("");
  print_line("numerics contract " + contract_line(config, device));
  print_line(format("  {:<36} {:>6} {:>7}  {}", "sum over", "units", "leaves", "leaves of each rank"));
  for (const SumSite& site : sum_sites(config.model)) {
    const int64_t leaves = site.leaves(config.numerics.leaves);
    for (const int width : std::set<int>(widths.begin(), widths.end())) {
      const std::string name = grid.uniform() ? site.name : format("{}, {} ranks", site.name, width);
      print_line(format("  {:<36} {:>6} {:>7}  {}", name, site.units, leaves,
                        shares(leaves, head_leaves(site.units, site.parts, config.numerics.leaves, width))));
    }
  }
  if (config.numerics.tensor_reduce_dtype == Precision::kBF16) {
    print_line(
        "  leaves are rounded to bf16, and travel so where every rank has one. Not so those that never are alone:");
    print_line("  of input gradients of q, k and v where query heads are cut in runs, and of the per-layer projection");
  }
  print_workers(config, grid);
  print_line(format("  the same bits with parallel.tensor {}, or with uneven {}; parallel.data {}",
                    join_numbers(fitting_tensor_degrees(config, false)),
                    join_numbers(fitting_tensor_degrees(config, true)),
                    join_numbers(fitting_data_degrees(config, batch))));
}

}  // namespace invar::app
