#pragma once

#include <memory>

#include "comm/mpi_communicator.h"
#include "config/config.h"
#include "device/stream.h"

namespace invar::app {

// What device: auto comes to on this machine. Error{kConfig} for a device that this build or machine has not.
DeviceType choose_device(const Config& config);

// Where a rank computes, and the communicator over all ranks that moves what lies there.
struct RankDevice {
  Stream stream;
  std::shared_ptr<Communicator> world;
  bool shares_gpus = false;  // some of the ranks have one GPU
};

// The rank's own GPU, which must be its alone unless comm.share_gpus allows others, or its share of the host's cores.
// Throws on all ranks or on none, as together() does. Collective over `world`, the ranks of the session that compute.
RankDevice open_device(const Config& config, MpiSession& session, Communicator& world);

// For one of several ranks that are threads of this process: they share a GPU.
RankDevice open_thread_device(const Config& config, Communicator& world, int threads);

}  // namespace invar::app
