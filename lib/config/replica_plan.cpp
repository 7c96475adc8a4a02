#include "config/replica_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "config/failed_slots.h"
#include "config/refuse.h"
#include "config/replica_shares.h"
#include "config/resolved.h"
#include "core/philox.h"

namespace invar {
namespace {

constexpr std::string_view kFailedKey = "parallel.nonuniform.failed";
constexpr std::string_view kWidthsKey = "parallel.nonuniform.tensor_widths";

bool gives_lists(const NonuniformConfig& nonuniform) {
  const NonuniformConfig defaults;
  return nonuniform.tp_base != defaults.tp_base || nonuniform.tp_spares != defaults.tp_spares ||
         nonuniform.num_reduced_tp_dp_ranks != defaults.num_reduced_tp_dp_ranks ||
         nonuniform.non_active_ranks_per_dp != defaults.non_active_ranks_per_dp;
}

// The grid without failures, of a config that validate() has accepted.
ReplicaPlan plan_grid(const Config& config, int launched) {
  const int tensor = config.parallel.tensor;
  const int ranks = launched - config.parallel.spare;
  const int data = replica_degree(config, ranks);
  INVAR_CHECK(ranks > 0 && ranks == tensor * data, "{} ranks for tensor {} x data {}", ranks, tensor, data);
  ReplicaPlan plan;
  plan.widths.assign(static_cast<size_t>(data), tensor);
  plan.samples.assign(static_cast<size_t>(data), global_batch_size(config, ranks) / data);
  plan.places.resize(static_cast<size_t>(launched));
  for (int rank = 0; rank < ranks; ++rank) {
    plan.places[static_cast<size_t>(rank)] = {rank / tensor, rank % tensor, rank / tensor, rank % tensor};
  }
  return plan;
}

// Shares the batch of `data` whole replicas out to the live ones, which are these of them.
void share_batch(const Config& config, int data, std::span<const int> grid_replicas, ReplicaPlan& plan) {
  const std::vector<double>& measured = config.parallel.nonuniform.speeds;
  if (!measured.empty() && std::ssize(measured) != data) {
    refuse(config, {"parallel.nonuniform.speeds"},
           format("parallel.nonuniform.speeds has {} numbers for {} replicas", measured.size(), data),
           format("give {}, also for replicas that are left out", data));
  }
  for (const double speed : measured) check_positive(config, "parallel.nonuniform.speeds", speed, UsedAs::kF64);
  const int64_t batch = grid_batch(config, data);
  if (is_whole_grid(config, plan)) {
    plan.samples.assign(plan.widths.size(), batch / data);  // check_batch() sees to it that this is exact
    return;
  }
  plan.samples = share_samples(config, batch, data, replica_speeds(config, plan.widths, grid_replicas));
}

ReplicaPlan plan_widths(const Config& config, int launched) {
  const ParallelConfig& parallel = config.parallel;
  ReplicaPlan plan;
  plan.widths = parallel.nonuniform.tensor_widths;
  const int replicas = static_cast<int>(plan.widths.size());
  if (parallel.data != 0 && parallel.data != replicas) {
    refuse(config, {kWidthsKey, "parallel.data"},
           format("{} has {} replicas, but parallel.data = {}", kWidthsKey, replicas, parallel.data),
           format("set parallel.data: {}, or auto", replicas));
  }
  for (const int width : plan.widths) {
    if (width >= 1 && width <= parallel.tensor) continue;
    refuse(config, {kWidthsKey, "parallel.tensor"},
           format("{}: {} is not from 1 to parallel.tensor = {}, the ranks of a whole replica", kWidthsKey, width,
                  parallel.tensor),
           width < 1 ? "leave the replica out" : format("set parallel.tensor: {}", width));
  }
  const int needed = plan.training_ranks() + parallel.spare;
  if (launched != needed) {
    refuse(config, {kWidthsKey},
           format("{} and parallel.spare come to {} + {} = {} ranks, but the job has {}", kWidthsKey,
                  plan.training_ranks(), parallel.spare, needed, launched),
           format("start {} ranks (mpirun -n {})", needed, needed));
  }
  for (int replica = 0; replica < replicas; ++replica) {
    for (int rank = 0; rank < plan.widths[static_cast<size_t>(replica)]; ++rank) {
      plan.places.push_back({replica, rank, replica, rank});
    }
  }
  plan.places.resize(static_cast<size_t>(launched));
  std::vector<int> all(plan.widths.size());
  std::iota(all.begin(), all.end(), 0);
  share_batch(config, replicas, all, plan);
  return plan;
}

// The launched rank of every slot of the grid and every spare; −1: not launched.
std::vector<int> ranks_of_slots(const Config& config, int launched, const std::set<int>& failed) {
  const ParallelConfig& parallel = config.parallel;
  const int slots = parallel.tensor * parallel.data + parallel.spare;
  const int survivors = slots - static_cast<int>(failed.size());
  if (launched != slots && launched != survivors) {
    refuse(config, {kFailedKey, "parallel.data", "parallel.spare"},
           format("tensor · data + spare = {} · {} + {} = {} ranks, {} without the {} failed ones, but the job has {}",
                  parallel.tensor, parallel.data, parallel.spare, slots, survivors, failed.size(), launched),
           format("start {} ranks, of which the failed ones idle, or {} survivors", slots, survivors));
  }
  std::vector<int> ranks;
  int next = 0;
  for (int slot = 0; slot < slots; ++slot) {
    ranks.push_back(launched == slots || !failed.contains(slot) ? next++ : -1);
  }
  return ranks;
}

// Who trains in each slot of the grid, the spares of failed slots included; −1: nobody.
std::vector<int> fill_slots(int grid_slots, const std::vector<int>& ranks, const std::set<int>& failed) {
  std::vector<int> filled(ranks.begin(), ranks.begin() + grid_slots);
  int spare = grid_slots;
  for (const int slot : failed) {
    if (slot >= grid_slots) break;
    while (failed.contains(spare)) ++spare;
    filled[static_cast<size_t>(slot)] = spare < std::ssize(ranks) ? ranks[static_cast<size_t>(spare++)] : -1;
  }
  return filled;
}

ReplicaPlan plan_failures(const Config& config, int launched, std::span<const HostSlot> hosts) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.data == 0) {
    refuse(config, {kFailedKey, "parallel.data"},
           "failed ranks are slots of the grid parallel.tensor · data, but parallel.data is auto",
           "set parallel.data to the replicas before the failures");
  }
  const int64_t slots = int64_t{parallel.tensor} * parallel.data + parallel.spare;
  if (slots > std::numeric_limits<int>::max()) {
    refuse(config, {"parallel.data", "parallel.tensor"},
           format("parallel.tensor · data + spare = {} ranks are more than a job can have", slots),
           "lower parallel.data");
  }
  const std::set<int> failed = failed_slots(config, launched, hosts);
  const std::vector<int> ranks = ranks_of_slots(config, launched, failed);
  const std::vector<int> filled = fill_slots(parallel.tensor * parallel.data, ranks, failed);
  ReplicaPlan plan;
  plan.places.resize(static_cast<size_t>(launched));
  std::vector<int> grid_replicas;
  for (int replica = 0; replica < parallel.data; ++replica) {
    const auto begin = filled.begin() + replica * parallel.tensor;
    const auto live = parallel.tensor - static_cast<int>(std::count(begin, begin + parallel.tensor, -1));
    const bool dropped = live < std::max(1, parallel.nonuniform.min_tensor);
    int tensor_rank = 0;
    for (int slot = 0; slot < parallel.tensor; ++slot) {
      const int rank = *(begin + slot);
      const int own = ranks[static_cast<size_t>(replica * parallel.tensor + slot)];
      if (own >= 0) plan.places[static_cast<size_t>(own)] = {-1, -1, replica, slot};
      if (rank < 0) continue;
      plan.places[static_cast<size_t>(rank)] = {-1, -1, replica, slot};
      if (dropped) continue;
      plan.places[static_cast<size_t>(rank)].replica = static_cast<int>(plan.widths.size());
      plan.places[static_cast<size_t>(rank)].tensor_rank = tensor_rank++;
    }
    if (dropped) continue;
    plan.widths.push_back(live);
    grid_replicas.push_back(replica);
  }
  if (plan.widths.empty()) {
    refuse(config, {kFailedKey, "parallel.nonuniform.min_tensor"},
           format("no replica has {} live ranks left (parallel.nonuniform.min_tensor)", parallel.nonuniform.min_tensor),
           "lower parallel.nonuniform.min_tensor, or start other ranks");
  }
  share_batch(config, parallel.data, grid_replicas, plan);
  return plan;
}

}  // namespace

int ReplicaPlan::training_ranks() const {
  return std::accumulate(widths.begin(), widths.end(), 0);
}

int64_t ReplicaPlan::batch() const {
  return std::accumulate(samples.begin(), samples.end(), int64_t{0});
}

bool ReplicaPlan::uniform() const {
  const auto alike = [](const auto& values) {
    return std::all_of(values.begin(), values.end(), [&](auto value) { return value == values.front(); });
  };
  return alike(widths) && alike(samples);
}

std::vector<int> ReplicaPlan::training_order() const {
  std::vector<int> order(static_cast<size_t>(training_ranks()));
  std::vector<int> first(widths.size(), 0);
  std::exclusive_scan(widths.begin(), widths.end(), first.begin(), 0);
  for (size_t rank = 0; rank < places.size(); ++rank) {
    const Place& place = places[rank];
    if (place.replica < 0) continue;
    order[static_cast<size_t>(first[static_cast<size_t>(place.replica)] + place.tensor_rank)] = static_cast<int>(rank);
  }
  return order;
}

std::vector<int> ReplicaPlan::grid_places() const {
  std::vector<int> replicas(widths.size());
  for (const Place& place : places) {
    if (place.replica >= 0) replicas[static_cast<size_t>(place.replica)] = place.grid_replica;
  }
  return replicas;
}

uint64_t ReplicaPlan::hash() const {
  std::string text = "widths";
  for (const int width : widths) text += format(" {}", width);
  text += " samples";
  for (const int64_t share : samples) text += format(" {}", share);
  for (const Place& place : places) {
    text += format(", {} {} {} {}", place.replica, place.tensor_rank, place.grid_replica, place.grid_slot);
  }
  return hash_name(text);
}

bool has_nonuniform(const Config& config) {
  const NonuniformConfig& nonuniform = config.parallel.nonuniform;
  return !nonuniform.failed.empty() || !nonuniform.tensor_widths.empty() || nonuniform.tp_spares != 0;
}

int grid_replicas(const Config& config, const ReplicaPlan& plan) {
  const bool failed = has_nonuniform(config) && config.parallel.data != 0;
  return failed ? config.parallel.data : static_cast<int>(plan.widths.size());
}

int64_t grid_batch(const Config& config, int replicas) {
  const TrainConfig& train = config.train;
  return train.global_batch_size != 0 ? train.global_batch_size : train.micro_batch_size * replicas;
}

bool is_whole_grid(const Config& config, const ReplicaPlan& plan) {
  const ParallelConfig& parallel = config.parallel;
  return std::ssize(plan.widths) == grid_replicas(config, plan) && parallel.nonuniform.speeds.empty() &&
         std::all_of(plan.widths.begin(), plan.widths.end(), [&](int width) { return width == parallel.tensor; });
}

std::vector<std::string> plan_remarks(const Config& config, const ReplicaPlan& plan) {
  std::vector<std::string> remarks;
  const auto launched = static_cast<int>(plan.places.size());
  const int data = grid_replicas(config, plan);
  if (std::ssize(plan.widths) < data) {
    std::string dropped;
    for (int replica = 0; replica < data; ++replica) {
      const bool trains = std::any_of(plan.places.begin(), plan.places.end(), [&](const ReplicaPlan::Place& place) {
        return place.replica >= 0 && place.grid_replica == replica;
      });
      if (!trains) dropped += format("{}{}", dropped.empty() ? "" : ", ", replica);
    }
    remarks.push_back(
        format("left out: replica {} of {}, with fewer live ranks than parallel.nonuniform.min_tensor = {}", dropped,
               data, config.parallel.nonuniform.min_tensor));
  }
  if (config.parallel.nonuniform.tp_base > 0 && config.parallel.nonuniform.tp_spares == 0) {
    remarks.push_back("parallel.nonuniform.tp_base changes nothing while tp_spares is 0");
  }
  if (plan.training_ranks() < launched) {
    remarks.push_back(format("{} of {} ranks idle", launched - plan.training_ranks(), launched));
  }
  if (const int64_t batch = grid_batch(config, data); plan.batch() < batch) {
    remarks.push_back(format("parallel.nonuniform.batch: shrink makes the global batch {} instead of {} samples{}",
                             plan.batch(), batch,
                             config.numerics.reduction == Reduction::kInvariant
                                 ? ": not the bits of the whole grid, whatever numerics.reduction: invariant says"
                                 : ""));
  }
  return remarks;
}

ReplicaPlan plan_replicas(const Config& config, int launched, std::span<const HostSlot> hosts) {
  INVAR_CHECK(hosts.empty() || std::ssize(hosts) == launched, "{} hosts of {} ranks", hosts.size(), launched);
  if (!has_nonuniform(config)) return plan_grid(config, launched);
  const NonuniformConfig& nonuniform = config.parallel.nonuniform;
  const int forms = (nonuniform.failed.empty() ? 0 : 1) + (nonuniform.tensor_widths.empty() ? 0 : 1) +
                    (gives_lists(nonuniform) ? 1 : 0);
  if (forms > 1) {
    refuse(config, {kWidthsKey, kFailedKey},
           "parallel.nonuniform.failed, tensor_widths and Megatron-LM's tp_spares are three ways to say what is lost",
           "keep one of them");
  }
  return nonuniform.tensor_widths.empty() ? plan_failures(config, launched, hosts) : plan_widths(config, launched);
}

}  // namespace invar
