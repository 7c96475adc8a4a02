#pragma once

#include <chrono>
#include <functional>

#include "comm/communicator.h"

namespace invar {

struct NcclOptions {
  // A collective of GPU memory that has not finished so long after its turn came ends the job.
  std::chrono::milliseconds timeout{600000};
  // Called in a thread of its own with what this rank was doing; expected to end the job.
  std::function<void(const std::string& report)> on_failure;
  // Debugging: every collective waits until it is done. The bits are the same.
  bool synchronous = false;
  // Ranks have the same GPU. NCCL, which refuses that within a host, takes each rank for a host of its own: sets
  // NCCL_HOSTID in the environment of the process.
  bool share_gpus = false;
};

// GPU memory over NCCL, whose sums have an order of its own choice, but the same bits on every rank. `host` moves host
// memory among the same ranks, all of a job: without share_gpus each has the GPU of its stream to itself. A group
// connects at its first collective. Error{kConfig} in a build without NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(const std::shared_ptr<Communicator>& host,
                                                     const NcclOptions& options);

}  // namespace invar
