#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/recording_communicator.h"

namespace invar {

// The rank grid: world_rank = tensor_rank + tensor · data_rank. A pure function of two sizes.
struct Topology {
  int tensor = 1;
  int data = 1;

  int world() const { return tensor * data; }
  int tensor_rank(int world_rank) const { return world_rank % tensor; }
  int data_rank(int world_rank) const { return world_rank / tensor; }
  // "tensor 2 with sequence parallelism x data 4"
  std::string describe(bool sequence_parallel) const;
};

// Forms groups out of a communicator. Every rank knows every rank's color, so a rank without peers (a recording
// communicator) can form them too.
class GroupMaker {
 public:
  GroupMaker() = default;
  explicit GroupMaker(TrafficTable* traffic) : traffic_(traffic) {}
  std::unique_ptr<Communicator> make(Communicator& parent, const std::vector<int>& colors, std::string name) const;

 private:
  TrafficTable* traffic_ = nullptr;
};

// The communicators of one rank.
struct ProcessGroups {
  Topology topology;
  Communicator* world = nullptr;
  std::unique_ptr<Communicator> tensor;  // ranks that share a replica of the model
  std::unique_ptr<Communicator> data;    // ranks that hold the same shards
  GroupMaker maker;
};
ProcessGroups make_process_groups(Communicator& world, Topology topology, GroupMaker maker = {});

}  // namespace invar
