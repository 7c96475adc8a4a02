#pragma once

#include <algorithm>
#include <memory>

#include "core/tensor.h"

namespace invar {

class CudaStream;  // device/cuda/cuda_stream.h

// Order of execution on one device. On the CPU every operation is done when it returns, and a stream only says how
// many threads an operation may use; on meta nothing runs; on CUDA operations are queued and run one after another, and
// the threads are for work on the host. Copies share the queue and have the properties that they were copied with.
class Stream {
 public:
  explicit Stream(DeviceType device, int threads = 1) : device_(device), target_(device), threads_(threads) {}
  // Nothing runs, but sizes that depend on the device are those of `target`.
  static Stream meta(DeviceType target) {
    Stream stream(DeviceType::kMeta);
    stream.target_ = target;
    if (target == DeviceType::kCuda) stream.momentary_ = std::make_shared<int64_t>(0);
    return stream;
  }
  // See make_cuda_stream().
  explicit Stream(std::shared_ptr<CudaStream> cuda, int threads = 1)
      : device_(DeviceType::kCuda), target_(DeviceType::kCuda), threads_(threads), cuda_(std::move(cuda)) {}

  DeviceType device() const { return device_; }
  DeviceType target() const { return target_; }
  int threads() const { return threads_; }
  // Whether sums on this stream must have the bits of the fixed order (`numerics.reduction: invariant`).
  bool invariant() const { return invariant_; }
  void set_invariant(bool invariant) { invariant_ = invariant; }
  // On meta with a GPU as target, of this stream and its copies: the most memory that one operation would take there
  // beside arenas, and give back. Nothing is noted elsewhere.
  void note_momentary(int64_t bytes) const {
    if (momentary_ != nullptr) *momentary_ = std::max(*momentary_, bytes);
  }
  int64_t momentary() const { return momentary_ != nullptr ? *momentary_ : 0; }
  // Of a stream on CUDA.
  CudaStream& cuda() const { return *cuda_; }

 private:
  DeviceType device_;
  DeviceType target_;
  int threads_ = 1;
  bool invariant_ = false;
  std::shared_ptr<int64_t> momentary_;
  std::shared_ptr<CudaStream> cuda_;
};

}  // namespace invar
