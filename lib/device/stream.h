#pragma once

#include <memory>

#include "core/tensor.h"

namespace invar {

class CudaStream;  // device/cuda/cuda_stream.h

// Order of execution on one device. On the CPU every operation is done when it returns, and a stream only says how
// many threads an operation may use; on meta nothing runs; on CUDA operations are queued and run one after another, and
// the threads are for work on the host. Copies share the queue.
class Stream {
 public:
  explicit Stream(DeviceType device, int threads = 1) : device_(device), target_(device), threads_(threads) {}
  // Nothing runs, but sizes that depend on the device are those of `target`.
  static Stream meta(DeviceType target) {
    Stream stream(DeviceType::kMeta);
    stream.target_ = target;
    return stream;
  }
  // See make_cuda_stream().
  explicit Stream(std::shared_ptr<CudaStream> cuda, int threads = 1)
      : device_(DeviceType::kCuda), target_(DeviceType::kCuda), threads_(threads), cuda_(std::move(cuda)) {}

  DeviceType device() const { return device_; }
  DeviceType target() const { return target_; }
  int threads() const { return threads_; }
  // Of a stream on CUDA.
  CudaStream& cuda() const { return *cuda_; }

 private:
  DeviceType device_;
  DeviceType target_;
  int threads_ = 1;
  std::shared_ptr<CudaStream> cuda_;
};

}  // namespace invar
