#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/config.h"

namespace invar {

// Who trains what when replicas (data-parallel copies of the model) have unequal tensor-parallel widths, because GPUs
// are lost (parallel.nonuniform) or ranks wait in reserve (parallel.spare). Without either it is the uniform grid.
struct ReplicaPlan {
  // Of the live replicas, in the order of the grid; dropped ones are not listed.
  std::vector<int> widths;       // tensor ranks
  std::vector<int64_t> samples;  // of a step

  struct Place {
    int replica = -1;  // live one that the rank belongs to; −1: the rank is idle
    int tensor_rank = -1;
    // The slot of the grid tensor · data that the rank stands in; −1: a spare that nothing needs. A failed slot that a
    // spare has taken is named by both, of which the spare trains.
    int grid_replica = -1;
    int grid_slot = -1;

    bool operator==(const Place&) const = default;
  };
  std::vector<Place> places;  // of each launched rank

  int training_ranks() const;  // Σ widths
  int64_t batch() const;       // Σ samples, the global batch
  bool uniform() const;        // all widths and all samples are equal
  // Launched ranks that train, ordered by (replica, tensor rank): the ranks of the training world.
  std::vector<int> training_order() const;
  std::vector<int> grid_places() const;  // of each live replica, the one of the grid that it stands in
  uint64_t hash() const;                 // of everything above

  bool operator==(const ReplicaPlan&) const = default;
};

// Where a launched rank computes.
struct HostSlot {
  std::string host;
  int local_rank = 0;  // its number among the ranks of the host, which take the GPUs in turn
};

// The config has parallel.nonuniform.failed, tensor_widths, or Megatron-LM's form of failures, which tp_spares: 0 turns
// off.
bool has_nonuniform(const Config& config);

// Of the whole grid: replicas, and samples of a step.
int grid_replicas(const Config& config, const ReplicaPlan& plan);
int64_t grid_batch(const Config& config, int replicas);

// All replicas of the grid are there in full width, and nothing says that their speeds differ: they are cut and share
// the batch as without failures. Otherwise a replica is cut as with parallel.uneven: true.
bool is_whole_grid(const Config& config, const ReplicaPlan& plan);

// What of a plan people must know: replicas that are left out, idle ranks, a smaller batch. A line each. The config
// must be the one that was planned from.
std::vector<std::string> plan_remarks(const Config& config, const ReplicaPlan& plan);

// The plan for `launched` ranks: all slots of the grid and the spares, or only those that have not failed. `hosts` is
// empty or has one entry per launched rank; failures named by host need it. Pure: every rank comes to the same plan.
// The rules:
// - Launched rank i < tensor · data is slot (i / tensor, i % tensor); spares follow. If only survivors are launched,
//   rank i is the i-th slot that has not failed.
// - Spares take failed slots in ascending order.
// - Survivors of a replica keep their order: the tensor rank is the number of live slots before. Tensor ranks hold
//   contiguous runs of units, of unequal length if need be, so that order is all there is to keep.
// - A replica with fewer than min_tensor live slots, or none, is dropped, and its survivors are idle.
// - The batch is train.global_batch_size, or if that is auto micro_batch_size · data of the grid. It is shared in
//   micro-batches, or with numerics.reduction: invariant in whole logical workers (replica_shares.h).
//
// Error{kConfig} with keys and hint for anything that cannot be planned. A config without parallel.nonuniform must be
// one that validate() accepts.
ReplicaPlan plan_replicas(const Config& config, int launched, std::span<const HostSlot> hosts = {});

}  // namespace invar
