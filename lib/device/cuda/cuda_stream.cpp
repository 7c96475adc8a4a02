#include "device/cuda/cuda_stream.h"

#include <cuda_profiler_api.h>

#include <algorithm>
#include <cstring>

#include "device/device.h"

namespace invar {
namespace {

constexpr int64_t kStagingBytes = 4 << 20;

void check_device_index(int index) {
  const int count = cuda_device_count();
  if (index < count) return;
  throw Error(ErrorKind::kConfig, format("GPU {} is wanted, but this process sees {}", index, count),
              "start at most one rank per GPU of a host, and look at CUDA_VISIBLE_DEVICES");
}

}  // namespace

void check_cuda(cudaError_t code, std::string_view call) {
  if (code == cudaSuccess) return;
  throw Error(ErrorKind::kFault, format("{}: {}", call, cudaGetErrorString(code)));
}

void check_launch(std::string_view op) {
  check_cuda(cudaGetLastError(), op);
}

CudaStream::CudaStream(int device, std::shared_ptr<std::string> phase) : device_(device), phase_(std::move(phase)) {
  check_device_index(device);
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaMallocHost(&staging_, kStagingBytes), "cudaMallocHost");
  check_cuda(cudaEventCreateWithFlags(&staged_, cudaEventDisableTiming), "cudaEventCreate");
}

CudaStream::~CudaStream() {
  // Work that waits for a peer may never end while this rank unwinds; the process ends, and the memory with it.
  if (std::uncaught_exceptions() == 0) cudaStreamSynchronize(stream_);
  attachments_.clear();
  cudaFree(workspace_);
  cudaFreeHost(staging_);
  cudaEventDestroy(staged_);
  cudaStreamDestroy(stream_);
}

void* CudaStream::workspace(int64_t bytes) {
  if (bytes <= workspace_bytes_) return workspace_;
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");  // of those who use the old one
  check_cuda(cudaFree(workspace_), "cudaFree");
  workspace_ = nullptr;
  workspace_bytes_ = 0;
  if (const cudaError_t code = cudaMalloc(&workspace_, static_cast<size_t>(bytes)); code != cudaSuccess) {
    throw Error(ErrorKind::kFault,
                format("out of GPU memory: {} MiB for the workspace of an operation: {}", bytes >> 20,
                       cudaGetErrorString(code)),
                "use a smaller micro-batch, more ranks or train.recompute: selective or full");
  }
  workspace_bytes_ = bytes;
  return workspace_;
}

void CudaStream::upload(const void* from, void* to, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += kStagingBytes) {
    const auto count = static_cast<size_t>(std::min(kStagingBytes, bytes - begin));
    check_cuda(cudaEventSynchronize(staged_), "cudaEventSynchronize");
    std::memcpy(staging_, static_cast<const std::byte*>(from) + begin, count);
    check_cuda(cudaMemcpyAsync(static_cast<std::byte*>(to) + begin, staging_, count, cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync to the device");
    check_cuda(cudaEventRecord(staged_, stream_), "cudaEventRecord");
  }
}

bool has_cuda() {
  return true;
}

int64_t cuda_device_id(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  int64_t id = 0;
  std::memcpy(&id, properties.uuid.bytes, sizeof(id));
  return id;
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int current_cuda_device() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return index;
}

std::string describe_cuda_device(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return format("{}, {:.1f} GiB", properties.name, static_cast<double>(properties.totalGlobalMem) / (1 << 30));
}

std::string cuda_architecture(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return format("sm{}{}", properties.major, properties.minor);
}

Stream make_cuda_stream(int index, int threads) {
  return Stream(std::make_shared<CudaStream>(index), threads);
}

Stream queue_beside(const Stream& stream) {
  if (stream.device() != DeviceType::kCuda) return stream;
  return Stream(std::make_shared<CudaStream>(stream.cuda().device(), stream.cuda().phase()), stream.threads());
}

void wait_for(const Stream& stream, const Stream& other) {
  if (stream.device() != DeviceType::kCuda || &stream.cuda() == &other.cuda()) return;
  StreamMark here;
  here.set(other);
  here.hold(stream);
}

struct StreamMark::Event {
  cudaEvent_t handle = nullptr;

  Event() { check_cuda(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

void StreamMark::set(const Stream& stream) {
  if (stream.device() != DeviceType::kCuda) return;
  if (event_ == nullptr) event_ = std::make_shared<Event>();
  check_cuda(cudaEventRecord(event_->handle, cuda_handle(stream)), "cudaEventRecord");
}

void StreamMark::hold(const Stream& stream) const {
  if (event_ == nullptr) return;
  check_cuda(cudaStreamWaitEvent(cuda_handle(stream), event_->handle, 0), "cudaStreamWaitEvent");
}

void set_phase(const Stream& stream, const std::string& phase) {
  if (stream.device() == DeviceType::kCuda) stream.cuda().set_phase(phase);
}

void start_profile(const Stream& stream) {
  synchronize(stream);
  if (stream.device() == DeviceType::kCuda) check_cuda(cudaProfilerStart(), "cudaProfilerStart");
}

void stop_profile(const Stream& stream) {
  synchronize(stream);
  if (stream.device() == DeviceType::kCuda) check_cuda(cudaProfilerStop(), "cudaProfilerStop");
}

void synchronize(const Stream& stream) {
  if (stream.device() == DeviceType::kCuda) check_cuda(cudaStreamSynchronize(cuda_handle(stream)), "cuda stream");
}

void copy_across(const Stream& stream, const Tensor& from, const Tensor& to) {
  INVAR_CHECK(from.dtype() == to.dtype() && from.numel() == to.numel(), "copy of {} to {}", from.describe(),
              to.describe());
  if (from.is_meta() || to.is_meta() || from.empty()) return;
  const auto bytes = static_cast<size_t>(from.bytes());
  const bool from_device = from.device() == DeviceType::kCuda;
  const bool to_device = to.device() == DeviceType::kCuda;
  if (!from_device && !to_device) {
    std::memcpy(to.raw(), from.raw(), bytes);
  } else if (to_device && !from_device) {
    stream.cuda().upload(from.raw(), to.raw(), from.bytes());
  } else {
    check_cuda(cudaMemcpyAsync(to.raw(), from.raw(), bytes, cudaMemcpyDefault, cuda_handle(stream)),
               "cudaMemcpyAsync from the device");
    if (!to_device) check_cuda(cudaStreamSynchronize(cuda_handle(stream)), "cudaMemcpyAsync from the device");
  }
}

void* allocate_cuda_memory(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    cudaGetLastError();  // not for the next call to find
    return nullptr;
  }
  check_cuda(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaMemset");  // streams do not wait for it
  return memory;
}

void free_cuda_memory(void* memory) noexcept {
  cudaFree(memory);
}

CudaMemoryInfo cuda_memory_info() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

struct DeviceTimer::Events {
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;

  Events() {
    check_cuda(cudaEventCreate(&start), "cudaEventCreate");
    check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  }
  ~Events() {
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
};

DeviceTimer::DeviceTimer() = default;

DeviceTimer::~DeviceTimer() = default;

void DeviceTimer::start(const Stream& stream) {
  start_ = std::chrono::steady_clock::now();
  if (stream.device() != DeviceType::kCuda) return;
  if (events_ == nullptr) events_ = std::make_unique<Events>();
  check_cuda(cudaEventRecord(events_->start, cuda_handle(stream)), "cudaEventRecord");
}

void DeviceTimer::stop(const Stream& stream) {
  stop_ = std::chrono::steady_clock::now();
  if (events_ != nullptr) check_cuda(cudaEventRecord(events_->stop, cuda_handle(stream)), "cudaEventRecord");
}

double DeviceTimer::milliseconds() const {
  if (events_ == nullptr) return std::chrono::duration<double, std::milli>(stop_ - start_).count();
  check_cuda(cudaEventSynchronize(events_->stop), "cudaEventSynchronize");
  float time = 0;
  check_cuda(cudaEventElapsedTime(&time, events_->start, events_->stop), "cudaEventElapsedTime");
  return static_cast<double>(time);
}

}  // namespace invar
