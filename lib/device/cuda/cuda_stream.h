#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>

#include "core/error.h"
#include "core/unique_handle.h"
#include "device/stream.h"

namespace invar {

// Error{kFault}: "cudaMalloc: out of memory".
void check_cuda(cudaError_t code, std::string_view call);
// After a kernel launch: the launch itself failed.
void check_launch(std::string_view op);

// A queue of one GPU and what operations on it share. Operations run one after another, so each may use the whole
// workspace. Used by one thread at a time.
class CudaStream {
 public:
  // phase: shared by all queues of the same work.
  explicit CudaStream(int device, std::shared_ptr<std::string> phase = std::make_shared<std::string>());
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t handle() const { return stream_; }
  int device() const { return device_; }

  // Device memory for the operation that asks, aligned to 256 bytes, uninitialised; valid until the next call. It grows
  // to the largest request, so only the first steps allocate.
  void* workspace(int64_t bytes);

  // Copies `bytes` of host memory, which may be used again on return, through pinned memory.
  void upload(const void* from, void* to, int64_t bytes);

  // What the work queued from now on belongs to, for messages: "layer 3 backward".
  void set_phase(std::string phase) { *phase_ = std::move(phase); }
  const std::shared_ptr<std::string>& phase() const { return phase_; }

  // An object that lives as long as the stream, one per type, made at first use by T(CudaStream&): handles and plan
  // caches of libraries.
  template <class T>
  T& attachment() {
    std::shared_ptr<void>& slot = attachments_[std::type_index(typeid(T))];
    if (slot == nullptr) slot = std::make_shared<T>(*this);
    return *static_cast<T*>(slot.get());
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  std::shared_ptr<std::string> phase_;
  void* staging_ = nullptr;  // pinned
  cudaEvent_t staged_ = nullptr;
  std::unordered_map<std::type_index, std::shared_ptr<void>> attachments_;
};

inline cudaStream_t cuda_handle(const Stream& stream) {
  return stream.cuda().handle();
}

}  // namespace invar
