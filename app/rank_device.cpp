#include "app/rank_device.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>

#include "app/commands.h"
#include "comm/device_communicator.h"
#include "comm/nccl_communicator.h"
#include "device/device.h"

namespace invar::app {
namespace {

// As an owner that does not own.
std::shared_ptr<Communicator> borrowed(Communicator& world) {
  return {&world, [](Communicator*) {}};
}

// The host's ranks share its GPUs in the order of their local ranks; where a launcher shows each rank its own GPU only,
// that one is number 0.
int device_index(const MpiSession& session) {
  return session.local_rank() % cuda_device_count();
}

// NCCL cannot share a GPU among ranks of a host. ids: of every rank's GPU.
void refuse_shared_gpu(const std::vector<int64_t>& ids, const Communicator& world, int index) {
  const auto first = std::find(ids.begin(), ids.end(), ids[static_cast<size_t>(world.rank())]) - ids.begin();
  if (first == world.rank()) return;
  throw Error(
      ErrorKind::kConfig,
      format("ranks {} and {} both have GPU {} ({}): every rank needs one to itself",
             world.job_rank(static_cast<int>(first)), world.job_rank(world.rank()), index, describe_cuda_device(index)),
      format("start at most {} on this host, or set device: cpu, or, to try a layout, comm.share_gpus: true",
             cuda_device_count()));
}

NcclOptions nccl_options(const Config& config, MpiSession& session, std::chrono::milliseconds timeout) {
  NcclOptions options;
  options.timeout = timeout;
  options.synchronous = config.comm.synchronous;
  options.on_failure = [&session](const std::string& report) {
    std::fputs(format("rank {}: {}\n", session.world().rank(), report).c_str(), stderr);
    constexpr auto kForTheOthers = std::chrono::seconds(3);  // to say where they are
    std::this_thread::sleep_for(kForTheOthers);
    // Not MPI_Abort, which is for the thread that MPI knows; the launcher ends the others.
    std::_Exit(static_cast<int>(ErrorKind::kFault));
  };
  return options;
}

}  // namespace

DeviceType choose_device(const Config& config) {
  const bool found = cuda_device_count() > 0;
  if (config.device == DeviceChoice::kCpu) return DeviceType::kCpu;
  if (config.device == DeviceChoice::kAuto) return found ? DeviceType::kCuda : DeviceType::kCpu;
  if (!has_cuda()) {
    throw Error(ErrorKind::kConfig, "device = cuda, but this invar was built without CUDA",
                "set device: cpu, or build with -DINVAR_CUDA=ON");
  }
  if (!found) {
    throw Error(ErrorKind::kConfig, "device = cuda, but this process sees no GPU",
                "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set device: cpu");
  }
  return DeviceType::kCuda;
}

RankDevice open_device(const Config& config, MpiSession& session, Communicator& world) {
  const auto timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(config.comm.timeout));
  session.set_timeout(timeout);
  const int threads = threads_per_rank(session.local_size(), usable_cores(session.local_cores()));
  DeviceType device = DeviceType::kCpu;
  together(world, [&] { device = choose_device(config); });
  const bool here = device == DeviceType::kCuda;
  const bool anywhere = all_reduce_value(world, int64_t{here}, ReduceOp::kMax) == 1;
  together(world, [&] {
    if (here == anywhere) return;
    throw Error(ErrorKind::kConfig, format("rank {} sees no GPU, but others do", world.job_rank(world.rank())),
                "look at nvidia-smi and CUDA_VISIBLE_DEVICES on its host, or set device: cpu");
  });
  if (!here) return {Stream(DeviceType::kCpu, threads), borrowed(world)};
  const int index = device_index(session);
  std::vector<int64_t> mine(1);
  together(world, [&] { mine[0] = cuda_device_id(index); });
  std::vector<int64_t> ids(static_cast<size_t>(world.size()));
  world.all_gather(Stream(DeviceType::kCpu), view_of(mine), view_of(ids), equal_counts(world.size(), 1));
  RankDevice rank{Stream(DeviceType::kCpu), nullptr};
  rank.shares_gpus = std::set<int64_t>(ids.begin(), ids.end()).size() < ids.size();
  together(world, [&] {
    if (!config.comm.share_gpus) refuse_shared_gpu(ids, world, index);
    rank.stream = make_cuda_stream(index, threads);
    NcclOptions options = nccl_options(config, session, timeout);
    options.share_gpus = rank.shares_gpus;
    rank.world = world.size() == 1 ? make_staged_communicator(borrowed(world))
                                   : make_nccl_communicator(borrowed(world), options);
  });
  return rank;
}

RankDevice open_thread_device(const Config& config, Communicator& world, int threads) {
  if (choose_device(config) == DeviceType::kCpu) return {Stream(DeviceType::kCpu, threads), borrowed(world)};
  return {make_cuda_stream(0, threads), make_staged_communicator(borrowed(world))};
}

}  // namespace invar::app
