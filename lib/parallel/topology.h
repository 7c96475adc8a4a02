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

// One axis of the rank grid: what a kind of parallelism says of itself.
struct Axis {
  std::string name;
  int size = 1;
  bool cuts_weights = false;  // its ranks hold different rows of the model; else copies of the same
  bool cuts_samples = false;  // its ranks read different samples of a step; else the same
};

// The rank grid. Its ranks count through the axes, the first one innermost: tensor, `between`, data. Two questions have
// answers of their own:
//   replica: ranks that hold the model once, together (axes that cut weights). Ranks at one place of every replica hold
//            the same shard.
//   reader:  ranks that read the same samples of a step (axes that do not cut samples).
// Replicas may be of unequal widths: then there is nothing between tensor and data.
struct Topology {
  int tensor = 1;  // ranks of a replica, of the widest one if they differ
  int data = 1;
  // Nonuniform: tensor ranks of each replica; else empty.
  std::vector<int> widths{};
  std::vector<int64_t> samples{};  // nonuniform: of a step, of each replica; else empty, and all have as many
  std::vector<Axis> between{};     // generalised tensor parallelism and the like

  std::vector<Axis> axes() const;  // of a uniform grid, the innermost first
  bool uniform() const { return widths.empty(); }
  int world() const;
  int tensor_rank(int world_rank) const { return world_rank - first_rank(row_of(world_rank)); }

  int replicas() const;
  int replica_of(int world_rank) const;
  int readers() const;
  int reader_of(int world_rank) const;
  // Of the `batch` samples of a step, those of a reader.
  Range samples_of(int64_t batch, int reader) const;

  // Tensor ranks of a replica, and the first of them, where nothing lies between tensor and data. first_rank of
  // replicas(): behind the last one.
  int width(int replica) const { return uniform() ? tensor : widths[static_cast<size_t>(replica)]; }
  int first_rank(int replica) const;

  // Micro-batches of a rank in a step of `batch` samples: "8"; "9, 7" of replicas that do not do as many.
  std::string describe_micro_steps(int64_t batch, int64_t micro_batch) const;
  // "tensor 2 with sequence parallelism x data 4", "tensor 4, 3 x data 2"
  std::string describe(bool sequence_parallel) const;

 private:
  int row_of(int world_rank) const;  // of tensor ranks
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
  std::unique_ptr<Communicator> tensor;  // ranks along the tensor axis
  // Ranks at one place of every replica: of replicas of one width they hold the same shard. That of the first ranks is
  // always of all replicas.
  std::unique_ptr<Communicator> holders;
  // Ranks that differ in their samples alone, if they are others than the holders; else null.
  std::unique_ptr<Communicator> readers_apart;
  // The world once more, for the gradients of replicas of unequal widths; else null.
  std::unique_ptr<Communicator> exchange;
  GroupMaker maker;

  Communicator& readers() const { return readers_apart != nullptr ? *readers_apart : *holders; }
  int replica() const { return topology.replica_of(world->rank()); }
  int reader() const { return topology.reader_of(world->rank()); }
};
ProcessGroups make_process_groups(Communicator& world, const Topology& topology, const GroupMaker& maker = {});

// What a rank sends in the groups of ranks of several replicas, for gradients and new values.
int64_t bytes_between_replicas(const TrafficTable& traffic);

// Host scalars, one of each reader, the same on all its ranks. Collective over the world.
int64_t sum_over_readers(const ProcessGroups& groups, int64_t value);
double sum_over_readers(const ProcessGroups& groups, const ExactSum& value);

}  // namespace invar
