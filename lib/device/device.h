#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "device/stream.h"

namespace invar {

// Whether this build has CUDA.
bool has_cuda();
// GPUs that this process can use; 0 in a build without CUDA.
int cuda_device_count();
// Equal for the same GPU in any process of any host, and for no other.
int64_t cuda_device_id(int index);
int current_cuda_device();  // of the calling thread
// "NVIDIA H100 80GB HBM3, 79.1 GiB"
std::string describe_cuda_device(int index);

// "sm90" of compute capability 9.0
std::string cuda_architecture(int index);

// A stream of its own on a GPU, which becomes the calling thread's current one: arenas that the thread makes lie there.
// Error{kConfig} without CUDA or without that GPU.
Stream make_cuda_stream(int index, int threads = 1);

// Another queue on the stream's device, with its properties; where there is only one order of execution, that one.
Stream queue_beside(const Stream& stream);
// What is queued on `stream` from now on starts after what is on `other` now.
void wait_for(const Stream& stream, const Stream& other);

// A point in the order of a stream, for others to wait for. Nothing on other devices.
class StreamMark {
 public:
  // Here, instead of where it was.
  void set(const Stream& stream);
  // What is queued on `stream` from now on starts after what lies before the mark. Nothing before it was set.
  void hold(const Stream& stream) const;

 private:
  struct Event;
  std::shared_ptr<Event> event_;
};

// What the work queued from now on belongs to, for messages: "layer 3 backward". Nothing on other devices.
void set_phase(const Stream& stream, const std::string& phase);

// What is queued from here to there is what a profiler records that waits for cudaProfilerStart. Each returns when
// everything queued on the stream is done. Nothing on other devices.
void start_profile(const Stream& stream);
void stop_profile(const Stream& stream);

// Returns when everything queued on the stream is done. Error{kFault} if some of it failed.
void synchronize(const Stream& stream);

// Copies the elements of `from` to `to`, of equal dtype and number of elements, each in host or device memory, in the
// order of the stream. Host memory may be used again on return. Nothing if either is on meta.
void copy_across(const Stream& stream, const Tensor& from, const Tensor& to);

// Zeroed memory of the current GPU for arenas; null if it cannot be had.
void* allocate_cuda_memory(int64_t bytes);
void free_cuda_memory(void* memory) noexcept;

struct CudaMemoryInfo {
  int64_t free = 0;
  int64_t total = 0;
};
CudaMemoryInfo cuda_memory_info();

// The time between two points in the order of a stream: that queued work takes on a GPU, by the clock elsewhere.
class DeviceTimer {
 public:
  DeviceTimer();
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  // Each marks a point in the order of the stream.
  void start(const Stream& stream);
  void stop(const Stream& stream);
  // Between the two marks; waits for the second.
  double milliseconds() const;

 private:
  struct Events;
  std::unique_ptr<Events> events_;  // of a stream on CUDA
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point stop_;
};

}  // namespace invar
