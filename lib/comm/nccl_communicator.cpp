#include "comm/nccl_communicator.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/checks.h"
#include "comm/device_communicator.h"
#include "comm/watchdog.h"
#include "device/cuda/cuda_stream.h"
#include "device/device.h"

namespace invar {
namespace {

using Clock = std::chrono::steady_clock;

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF64:
      return ncclFloat64;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
  }
  return ncclUint8;
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
  }
  return ncclSum;
}

// Events are made once and used again.
class EventPool {
 public:
  ~EventPool() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  std::shared_ptr<CUevent_st> take() {
    const std::lock_guard lock(mutex_);
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return {event, [this](cudaEvent_t used) {
              const std::lock_guard relock(mutex_);
              free_.push_back(used);
            }};
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// What the groups of one rank share.
struct Shared {
  explicit Shared(const NcclOptions& given) : options(given) {}

  // The watchdog looks at the events of this device.
  void start(int device) {
    if (watchdog) return;
    watchdog.emplace(options.timeout, options.on_failure, [device] { cudaSetDevice(device); });
  }

  NcclOptions options;
  EventPool events;
  std::optional<Watchdog> watchdog;  // ends before the events do
};

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(std::shared_ptr<Communicator> host, std::shared_ptr<Shared> shared)
      : DeviceCommunicator(std::move(host)), shared_(std::move(shared)) {}

  ~NcclCommunicator() override {
    if (comm_ == nullptr) return;
    shared_->watchdog->forget(this);
    // Destroying is collective and waits for peers, who do not come while this rank unwinds.
    constexpr auto kForPeers = std::chrono::seconds(30);
    bool finalized = false;
    if (std::uncaught_exceptions() == 0) {
      ncclResult_t result = ncclCommFinalize(comm_);
      if (result == ncclInProgress) result = settle(Clock::now() + kForPeers);
      finalized = result == ncclSuccess;
    }
    finalized ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> part = host().split(color, key, std::move(name));
    return part == nullptr ? nullptr : std::make_unique<NcclCommunicator>(std::move(part), shared_);
  }
  bool adds_in_rank_order() const override { return false; }

 private:
  void move_all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) override {
    enqueue("all_reduce", stream, buffer.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      return ncclAllReduce(buffer.raw(), buffer.raw(), count_of(buffer), type_of(buffer.dtype()), op_of(op), comm,
                           queue);
    });
  }

  void move_all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                       std::span<const int64_t> counts) override {
    enqueue("all_gather", stream, receive.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      const ncclDataType_t type = type_of(send.dtype());
      if (all_equal(counts)) return ncclAllGather(send.raw(), receive.raw(), count_of(send), type, comm, queue);
      return grouped([&] {
        for (int r = 0; r < size(); ++r) {
          const auto count = static_cast<size_t>(counts[static_cast<size_t>(r)]);
          const ncclResult_t result =
              count == 0 ? ncclSuccess
                         : ncclBroadcast(send.raw(), at(receive, offset_of(counts, r)), count, type, r, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        return ncclSuccess;
      });
    });
  }

  void move_reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive,
                           std::span<const int64_t> counts, ReduceOp op) override {
    enqueue("reduce_scatter", stream, send.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      const ncclDataType_t type = type_of(send.dtype());
      if (all_equal(counts)) {
        return ncclReduceScatter(send.raw(), receive.raw(), count_of(receive), type, op_of(op), comm, queue);
      }
      return grouped([&] {
        for (int r = 0; r < size(); ++r) {
          const auto count = static_cast<size_t>(counts[static_cast<size_t>(r)]);
          const ncclResult_t result = count == 0 ? ncclSuccess
                                                 : ncclReduce(at(send, offset_of(counts, r)), receive.raw(), count,
                                                              type, op_of(op), r, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        return ncclSuccess;
      });
    });
  }

  void move_all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts,
                       const Tensor& receive, std::span<const int64_t> receive_counts) override {
    enqueue("all_to_all", stream, send.bytes() + receive.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      const ncclDataType_t type = type_of(send.dtype());
      return grouped([&] {
        for (int r = 0; r < size(); ++r) {
          const auto sends = static_cast<size_t>(send_counts[static_cast<size_t>(r)]);
          const auto receives = static_cast<size_t>(receive_counts[static_cast<size_t>(r)]);
          ncclResult_t result = ncclSuccess;
          if (sends > 0) result = ncclSend(at(send, offset_of(send_counts, r)), sends, type, r, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
          if (receives > 0)
            result = ncclRecv(at(receive, offset_of(receive_counts, r)), receives, type, r, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        return ncclSuccess;
      });
    });
  }

  void move_exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    int64_t bytes = 0;
    for (const Message& message : sends) bytes += message.buffer.bytes();
    for (const Message& message : receives) bytes += message.buffer.bytes();
    enqueue("exchange", stream, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
      return grouped([&] {
        for (const Message& message : sends) {
          const ncclResult_t result = ncclSend(message.buffer.raw(), count_of(message.buffer),
                                               type_of(message.buffer.dtype()), message.peer, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        for (const Message& message : receives) {
          const ncclResult_t result = ncclRecv(message.buffer.raw(), count_of(message.buffer),
                                               type_of(message.buffer.dtype()), message.peer, comm, queue);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        return ncclSuccess;
      });
    });
  }

  void move_broadcast(const Stream& stream, const Tensor& buffer, int root) override {
    enqueue("broadcast", stream, buffer.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      return ncclBroadcast(buffer.raw(), buffer.raw(), count_of(buffer), type_of(buffer.dtype()), root, comm, queue);
    });
  }

  void move_send(const Stream& stream, const Tensor& buffer, int to) override {
    enqueue("send", stream, buffer.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      return ncclSend(buffer.raw(), count_of(buffer), type_of(buffer.dtype()), to, comm, queue);
    });
  }

  void move_receive(const Stream& stream, const Tensor& buffer, int from) override {
    enqueue("receive", stream, buffer.bytes(), [&](ncclComm_t comm, cudaStream_t queue) {
      return ncclRecv(buffer.raw(), count_of(buffer), type_of(buffer.dtype()), from, comm, queue);
    });
  }

  static size_t count_of(const Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }
  static bool all_equal(std::span<const int64_t> counts) {
    for (const int64_t count : counts) {
      if (count != counts.front()) return false;
    }
    return true;
  }
  static std::byte* at(const Tensor& tensor, int64_t element) {
    return static_cast<std::byte*>(tensor.raw()) + element * size_of(tensor.dtype());
  }

  template <class Body>
  static ncclResult_t grouped(Body body) {
    if (const ncclResult_t begun = ncclGroupStart(); begun != ncclSuccess) return begun;
    const ncclResult_t result = body();
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  }

  template <class Call>
  void enqueue(std::string_view operation, const Stream& stream, int64_t bytes, Call call) {
    connect(stream);
    const cudaStream_t queue = cuda_handle(stream);
    {
      const std::lock_guard lock(library_);
      check(operation, call(comm_, queue));
    }
    std::shared_ptr<CUevent_st> done = shared_->events.take();
    check_cuda(cudaEventRecord(done.get(), queue), "cudaEventRecord");
    std::string description = describe(operation, bytes, *stream.cuda().phase());
    shared_->watchdog->watch(this, std::move(description), [this, done = std::move(done)] {
      const cudaError_t code = cudaEventQuery(done.get());
      if (code != cudaErrorNotReady) check_cuda(code, "cudaEventQuery");
      if (code == cudaErrorNotReady) throw_if_broken();
      return code == cudaSuccess;
    });
    if (shared_->options.synchronous) synchronize(stream);
  }

  // In the watchdog's thread. Asking for a communicator's state completes what is under way on it, which NCCL lets one
  // thread do at a time; while this rank's own thread is inside NCCL, that one finds errors.
  void throw_if_broken() {
    const std::unique_lock lock(library_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    const ncclResult_t state = state_of(comm_);
    if (state == ncclSuccess || state == ncclInProgress) return;
    throw Error(ErrorKind::kFault, format("NCCL: {}", ncclGetErrorString(state)));
  }

  std::string describe(std::string_view operation, int64_t bytes, std::string_view where) {
    return format("{} {} in group '{}' (rank {} of {}), {} bytes{}{}", operation, ++sequence_, name(), rank(), size(),
                  bytes, where.empty() ? "" : ", ", where);
  }

  // The id goes from the group's first rank to the others through host memory.
  void connect(const Stream& stream) {
    if (comm_ != nullptr) return;
    shared_->start(stream.cuda().device());
    ncclUniqueId id{};
    if (rank() == 0) check("connect", ncclGetUniqueId(&id));
    std::array<int32_t, sizeof(id) / sizeof(int32_t)> words{};
    static_assert(sizeof(words) == sizeof(id));
    std::memcpy(words.data(), &id, sizeof(id));
    host().broadcast(stream, Tensor(words.data(), DType::kI32, DeviceType::kCpu, {std::ssize(words)}), 0);
    std::memcpy(&id, words.data(), sizeof(id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check("connect", ncclCommInitRankConfig(&comm_, size(), id, rank(), &config));
  }

  // Waits while NCCL says that it is still at it; its last word.
  ncclResult_t settle(Clock::time_point deadline) const {
    ncclResult_t state = state_of(comm_);
    while (state == ncclInProgress && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      state = state_of(comm_);
    }
    return state;
  }

  static ncclResult_t state_of(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    return asked == ncclSuccess ? state : asked;
  }

  void check(std::string_view operation, ncclResult_t result) const {
    if (result == ncclInProgress && comm_ != nullptr) result = settle(Clock::now() + shared_->options.timeout);
    if (result == ncclSuccess) return;
    const char* detail = comm_ == nullptr ? "" : ncclGetLastError(comm_);
    fail_collective(*this, operation,
                    format("NCCL: {}{}{}", result == ncclInProgress ? "timed out" : ncclGetErrorString(result),
                           *detail == '\0' ? "" : ": ", detail));
  }

  std::shared_ptr<Shared> shared_;
  std::mutex library_;  // held inside NCCL
  ncclComm_t comm_ = nullptr;
  int64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const std::shared_ptr<Communicator>& host,
                                                     const NcclOptions& options) {
  // NCCL reads it when a group connects.
  if (options.share_gpus) setenv("NCCL_HOSTID", format("rank {}", host->rank()).c_str(), 1);
  return std::make_unique<NcclCommunicator>(host, std::make_shared<Shared>(options));
}

}  // namespace invar
