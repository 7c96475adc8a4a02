#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/recording_communicator.h"
#include "config/replica_plan.h"
#include "core/range.h"

namespace invar {

// The rank grid: replica after replica of the model (data ranks), each of some tensor-parallel ranks. With replicas of
// one width world_rank = tensor_rank + tensor · data_rank.
struct Topology {
  int tensor = 1;  // ranks of a replica, of the widest one if they differ
  int data = 1;
  // Nonuniform, where a row has one owner among all ranks: tensor ranks of each replica; else empty.
  std::vector<int> widths{};
  std::vector<int64_t> samples{};  // nonuniform: of a step, of each replica; else empty, and all have as many

  bool uniform() const { return widths.empty(); }
  int world() const { return first_rank(data); }
  int width(int data_rank) const { return uniform() ? tensor : widths[static_cast<size_t>(data_rank)]; }
  int first_rank(int data_rank) const;  // of a replica; of `data`: behind the last one
  int data_rank(int world_rank) const;
  int tensor_rank(int world_rank) const { return world_rank - first_rank(data_rank(world_rank)); }
  // Of the `batch` samples of a step, those of a replica.
  Range samples_of(int64_t batch, int data_rank) const;
  // Micro-batches of a rank in a step of `batch` samples: "8"; "9, 7" of replicas that do not do as many.
  std::string describe_micro_steps(int64_t batch, int64_t micro_batch) const;
  // "tensor 2 with sequence parallelism x data 4", "tensor 4, 3 x data 2"
  std::string describe(bool sequence_parallel) const;
};

// Uniform if the replicas are alike.
Topology topology_of(const ReplicaPlan& plan);

// Forms groups out of a communicator. Every rank knows every rank's color, so a rank without peers can form them too.
class GroupMaker {
 public:
  using Peerless = std::function<std::unique_ptr<Communicator>(int rank, int size, std::string name)>;

  GroupMaker() = default;  // by split()
  explicit GroupMaker(Peerless make) : peerless_(std::move(make)) {}
  explicit GroupMaker(TrafficTable* traffic);  // of recording communicators
  std::unique_ptr<Communicator> make(Communicator& parent, const std::vector<int>& colors, std::string name) const;

 private:
  Peerless peerless_;
};

// The communicators of one rank.
struct ProcessGroups {
  Topology topology;
  Communicator* world = nullptr;
  std::unique_ptr<Communicator> tensor;  // ranks that share a replica of the model
  // Ranks of the same tensor rank, which hold the same shards if the replicas have one width; those of tensor rank 0
  // are always of all replicas.
  std::unique_ptr<Communicator> data;
  // The world once more, for the gradients of replicas of unequal widths; else null.
  std::unique_ptr<Communicator> exchange;
  GroupMaker maker;

  int data_rank() const { return topology.data_rank(world->rank()); }
};
ProcessGroups make_process_groups(Communicator& world, const Topology& topology, const GroupMaker& maker = {});

// What a rank sends in the groups of ranks of several replicas, for gradients and new values.
int64_t bytes_between_replicas(const TrafficTable& traffic);

// Host scalars, one of each replica, each the same on all its ranks. Collective over the world.
int64_t sum_over_replicas(const ProcessGroups& groups, int64_t value);
double sum_over_replicas(const ProcessGroups& groups, const ExactSum& value);

}  // namespace invar
