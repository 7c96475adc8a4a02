#include "app/plan_replicas.h"

#include <algorithm>
#include <array>
#include <optional>

#include "app/console.h"
#include "app/plan_units.h"
#include "config/plan_cost.h"
#include "config/units.h"
#include "config/validation.h"
#include "train/dry_run.h"

namespace invar::app {
namespace {

std::string run(Range held) {
  return format("{}-{}", held.begin, held.end - 1);
}

struct Held {
  const char* name;
  Range units;
};

// Of every kind that the model has.
std::vector<Held> units_of(const Config& config, int width, int tensor_rank) {
  const ModelConfig& model = config.model;
  const auto heads = [&](int64_t kv_heads) { return held_heads(config, kv_heads, width, tensor_rank).kv_heads; };
  const auto units = [&](int64_t all) { return held_units(config, all, width, tensor_rank); };
  std::vector<Held> held = {{"KV groups", heads(model.num_key_value_heads)}};
  if (const int64_t full = model.num_global_key_value_heads; full > 0) held.push_back({"of full layers", heads(full)});
  held.push_back({"FFN blocks ", units(ffn_blocks(model.intermediate_size))});
  if (const int64_t inputs = model.hidden_size_per_layer_input; inputs > 0) {
    held.push_back({"per-layer blocks", units(per_layer_blocks(inputs))});
  }
  held.push_back({"vocabulary units", units(vocab_units(model.vocab_size))});
  return held;
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
  std::string row =
      format("{} {:<6} {:>7} {:>6} {:>7} ", start, "train", replica, place.tensor_rank, plan.samples[replica]);
  for (const Held& held : units_of(config, plan.widths[replica], place.tensor_rank)) {
    row += format(" {:<{}}", run(held.units), std::string_view(held.name).size());
  }
  row.erase(row.find_last_not_of(' ') + 1);
  return row;
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
  Load sent;  // of gradients and new values in a step
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

// Of so many whole replicas that share this batch, cut and shared out as if damaged; none if they cannot.
std::optional<Needs> needs_of_whole(const Config& config, int replicas, int64_t batch, DeviceType device) {
  const int tensor = config.parallel.tensor;
  Config whole = config;
  whole.parallel.spare = 0;
  whole.parallel.data = replicas;
  whole.parallel.nonuniform = {};
  whole.parallel.nonuniform.tensor_widths.assign(static_cast<size_t>(replicas), tensor);
  whole.parallel.nonuniform.speeds.assign(static_cast<size_t>(replicas), 1);  // without any shares must be equal
  whole.train.global_batch_size = batch;
  try {
    validate(whole, tensor * replicas);
    return needs_of(whole, topology_of(plan_replicas(whole, tensor * replicas)), device);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kConfig) throw;
    return std::nullopt;
  }
}

void print_costs(const std::string& name, const std::array<std::optional<double>, 3>& values, int decimals,
                 const std::string& unit) {
  std::string row = format("  {:<24}", name);
  for (const auto& value : values) row += value ? format(" {:>11.{}f}", *value, decimals) : format(" {:>11}", "-");
  print_line(row + "  " + unit);
}

}  // namespace

void print_replicas(const Config& config, const ReplicaPlan& plan, std::span<const HostSlot> hosts) {
  print_line("");
  for (const std::string& remark : plan_remarks(config, plan)) print_line(remark);
  std::string header = format("{:>5}  {:<16} {:>3}  {:<12} {:<6} {:>7} {:>6} {:>7} ", "rank", "host", "gpu", "slot",
                              "role", "replica", "tensor", "samples");
  for (const Held& held : units_of(config, 1, 0)) header += format(" {}", held.name);
  print_line(header);
  constexpr size_t kShown = 512;
  for (size_t rank = 0; rank < std::min(kShown, plan.places.size()); ++rank) {
    print_line(row_of(config, plan, rank, hosts));
  }
  if (plan.places.size() > kShown) print_line(format("... and {} more ranks", plan.places.size() - kShown));
}

void print_cost(const Config& config, const ReplicaPlan& plan, DeviceType device) {
  const int tensor = config.parallel.tensor;
  const int replicas = grid_replicas(config, plan);
  const auto whole = static_cast<int>(std::count(plan.widths.begin(), plan.widths.end(), tensor));
  const int64_t batch = grid_batch(config, replicas);
  const PlanCost cost = plan_cost(config, plan);
  std::optional<double> throughput_alone;
  if (cost.step_time_without_damaged) throughput_alone = 1 / *cost.step_time_without_damaged;
  Config planned = config;
  planned.train.global_batch_size = plan.batch();
  const Needs here = needs_of(planned, topology_of(plan), device);
  const std::optional<Needs> grid = needs_of_whole(config, replicas, batch, device);
  const std::optional<Needs> alone = whole > 0 ? needs_of_whole(config, whole, batch, device) : std::nullopt;

  print_line("");
  print_line(format("what the plan costs beside the whole grid, tensor {} x data {}, and beside {}", tensor, replicas,
                    whole > 0 ? format("the whole replicas alone, data {}", whole) : "none: no replica is whole"));
  print_line(format("  {:<24} {:>11} {:>11} {:>11}", "", "planned", "whole grid", "whole alone"));
  print_costs(config.parallel.nonuniform.speeds.empty() ? "step time, modelled" : "step time, by speeds",
              {cost.step_time, 1, cost.step_time_without_damaged}, 3, "times");
  print_costs("samples a second", {cost.throughput, 1, throughput_alone}, 3, "times");
  const std::vector<int> launched = plan.training_order();
  const auto print_load = [&](const char* name, Load Needs::*load) {
    const auto size = [load](const Needs& needs) { return static_cast<double>((needs.*load).bytes) / (1 << 20); };
    const auto size_if = [&](const auto& needs) { return needs ? std::optional(size(*needs)) : std::nullopt; };
    print_costs(name, {size(here), size_if(grid), size_if(alone)}, 1,
                format("MiB, planned on rank {}", launched[static_cast<size_t>((here.*load).rank)]));
  };
  print_load("memory of a rank", &Needs::memory);
  print_load("gradients, values sent", &Needs::sent);
  if (!grid) print_line("  the whole grid is no possible layout");
}

}  // namespace invar::app
