#include "app/plan_replicas.h"

#include <algorithm>
#include <optional>

#include "app/console.h"
#include "app/plan_units.h"
#include "config/plan_cost.h"
#include "config/units.h"
#include "config/validation.h"
#include "train/train_state.h"

namespace invar::app {
namespace {

std::string run(Range held) {
  return format("{}-{}", held.begin, held.end - 1);
}

std::string units_of(const Config& config, int width, int tensor_rank) {
  const ModelConfig& model = config.model;
  return format("{:<9} {:<11} {}", run(held_heads(config, model.num_key_value_heads, width, tensor_rank).kv_heads),
                run(held_units(config, ffn_blocks(model.intermediate_size), width, tensor_rank)),
                run(held_units(config, vocab_units(model.vocab_size), width, tensor_rank)));
}

std::string row_of(const Config& config, const ReplicaPlan& plan, size_t rank, std::span<const HostSlot> hosts) {
  const ReplicaPlan::Place& place = plan.places[rank];
  const std::string host = hosts.empty() ? "-" : hosts[rank].host;
  const std::string gpu = hosts.empty() ? "-" : std::to_string(hosts[rank].local_rank);
  const bool in_grid = place.grid_replica >= 0;
  const std::string slot = in_grid ? format("dp{}.tp{}", place.grid_replica, place.grid_slot) : "-";
  const std::string start = format("{:>5}  {:<16} {:>3}  {:<12}", rank, host, gpu, slot);
  if (place.replica < 0) return format("{} {}", start, in_grid ? "idle" : "spare");
  const auto replica = static_cast<size_t>(place.replica);
  return format("{} {:<6} {:>7} {:>6} {:>7}  {}", start, "train", replica, place.tensor_rank, plan.samples[replica],
                units_of(config, plan.widths[replica], place.tensor_rank));
}

// Bytes of the rank that has most of them.
struct Load {
  int64_t bytes = 0;
  int rank = 0;

  void add(int64_t of_rank, int world_rank) {
    if (of_rank > bytes) *this = {of_rank, world_rank};
  }
};

struct Needs {
  Load memory;
  Load sent;  // to other replicas in a step
};

Needs needs_of(const Config& config, const Topology& grid, DeviceType device) {
  Needs most;
  for (const int replica : shown_replicas(config, grid)) {
    for (int rank = 0; rank < grid.width(replica); ++rank) {
      TrafficTable traffic;
      const int world_rank = grid.first_rank(replica) + rank;
      most.memory.add(measure_memory(config, grid, world_rank, device, &traffic).total(), world_rank);
      most.sent.add(bytes_between_replicas(traffic), world_rank);
    }
  }
  return most;
}

// The same without failures; none if that is no possible layout.
std::optional<Config> whole_config(const Config& config, int replicas) {
  Config whole = config;
  whole.parallel.nonuniform = {};
  whole.parallel.spare = 0;
  whole.parallel.data = replicas;
  try {
    validate(whole, whole.parallel.tensor * replicas);
  } catch (const Error&) {
    return std::nullopt;
  }
  return whole;
}

}  // namespace

void print_replicas(const Config& config, const ReplicaPlan& plan, std::span<const HostSlot> hosts) {
  print_line("");
  for (const std::string& remark : plan_remarks(config, plan)) print_line(remark);
  print_line(format("{:>5}  {:<16} {:>3}  {:<12} {:<6} {:>7} {:>6} {:>7}  {:<9} {:<11} {}", "rank", "host", "gpu",
                    "slot", "role", "replica", "tensor", "samples", "KV groups", "FFN blocks", "vocabulary units"));
  constexpr size_t kShown = 512;
  for (size_t rank = 0; rank < std::min(kShown, plan.places.size()); ++rank) {
    print_line(row_of(config, plan, rank, hosts));
  }
  if (plan.places.size() > kShown) print_line(format("... and {} more ranks", plan.places.size() - kShown));
}

void print_cost(const Config& config, const ReplicaPlan& plan, DeviceType device) {
  const int replicas = grid_replicas(config, plan);
  const PlanCost cost = plan_cost(config, plan);
  const std::string without = cost.step_time_without_damaged
                                  ? format("{:.3f} without the damaged replicas", *cost.step_time_without_damaged)
                                  : "no replica is whole";
  print_line("");
  print_line(format("beside the whole grid, tensor {} x data {}", config.parallel.tensor, replicas));
  print_line(format("  step time, {:<13} {:>11.3f} times; {}",
                    config.parallel.nonuniform.speeds.empty() ? "modelled" : "by speeds", cost.step_time, without));
  print_line(format("  samples a second         {:>11.3f} times", cost.throughput));
  const std::optional<Config> whole = whole_config(config, replicas);
  Config planned = config;
  planned.train.global_batch_size = plan.batch();
  const Needs here = needs_of(planned, topology_of(plan), device);
  const Needs there = whole ? needs_of(*whole, {config.parallel.tensor, replicas}, device) : Needs{};
  const std::vector<int> launched = plan.training_order();
  const auto line = [&](const char* name, const Load& now, const Load& before) {
    print_line(format("  {:<24} {} MiB (rank {}){}", name, mib(now.bytes), launched[static_cast<size_t>(now.rank)],
                      whole ? format(" instead of {} MiB", mib(before.bytes)) : ""));
  };
  line("memory of a rank", here.memory, there.memory);
  line("sent to other replicas", here.sent, there.sent);
}

}  // namespace invar::app
