#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "device/cuda/cuda_stream.h"
#include "ops/proofs.h"

namespace invar::ops::cuda {

// Device memory in the order of a stream; null if it cannot be had.
class Scratch {
 public:
  Scratch(cudaStream_t stream, int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

// What a stream proved: its attachment.
struct ProofRecord : Proofs {
  explicit ProofRecord(CudaStream& /*stream*/) {}
};

// Adds the time that it lives to the stream's record.
class ProofClock {
 public:
  explicit ProofClock(CudaStream& stream) : stream_(stream) {}
  ~ProofClock();
  ProofClock(const ProofClock&) = delete;
  ProofClock& operator=(const ProofClock&) = delete;

 private:
  CudaStream& stream_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Device memory while something is proved, aligned to 256 bytes. When it ends, the memory is the device's again, and
// the stream's record has the time and the bytes.
class Proof {
 public:
  // Error{kFault} if there is no such memory; what: "matmul ... sums in order".
  Proof(CudaStream& stream, int64_t bytes, std::string_view what);
  ~Proof();
  Proof(const Proof&) = delete;
  Proof& operator=(const Proof&) = delete;

  std::byte* memory() const { return scratch_->data(); }

 private:
  CudaStream& stream_;
  int64_t bytes_;
  ProofClock clock_;
  std::optional<Scratch> scratch_;
};

}  // namespace invar::ops::cuda
