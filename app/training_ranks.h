#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_communicator.h"
#include "config/replica_plan.h"
#include "parallel/topology.h"

namespace invar::app {

// The host and local number of every rank of the job, which failures may be named by. Collective over the job.
std::vector<HostSlot> gather_hosts(MpiSession& session);

// The ranks of a job that compute; with parallel.spare or failed ranks that were launched the others are idle.
class TrainingRanks {
 public:
  // config: accepted by validate(); its batch becomes what the plan says, for good. Collective over the job.
  // Error{kConfig} on every rank if they do not plan the same, or have other configs.
  TrainingRanks(Config& config, MpiSession& session, std::span<const HostSlot> hosts);

  const ReplicaPlan& plan() const { return plan_; }
  const std::vector<std::string>& remarks() const { return remarks_; }  // plan_remarks()
  bool idle() const { return world_ == nullptr; }                       // this rank
  Communicator& world() { return *world_; }                             // of those that compute
  // The same ranks share the batch by other speeds. config: accepted, with those; its batch as above. Collective over
  // world().
  void share_anew(Config& config, std::span<const HostSlot> hosts);
  // At the end of a job in which some ranks are idle: those sleep until the others come. Returns 0; WaitFailed if an
  // idle one does not come.
  int wait_for_the_others(MpiSession& session) const;

 private:
  void adopt_plan(Config& config);

  ReplicaPlan plan_;
  std::vector<std::string> remarks_;
  std::unique_ptr<Communicator> part_;
  Communicator* world_;
};

}  // namespace invar::app
