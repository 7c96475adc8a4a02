#include "ops/cuda/proof.h"

#include <algorithm>
#include <exception>

#include "ops/cuda/operations.h"

namespace invar::ops::cuda {

Scratch::Scratch(cudaStream_t stream, int64_t bytes) : stream_(stream) {
  if (cudaMallocAsync(&data_, static_cast<size_t>(bytes), stream) == cudaSuccess) return;
  cudaGetLastError();  // not for the next call to find
  data_ = nullptr;
}

Scratch::~Scratch() {
  if (data_ != nullptr) cudaFreeAsync(data_, stream_);
}

ProofClock::~ProofClock() {
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start_;
  stream_.attachment<ProofRecord>().seconds += time.count();
}

Proof::Proof(CudaStream& stream, int64_t bytes, std::string_view what)
    : stream_(stream), bytes_(bytes), clock_(stream) {
  scratch_.emplace(stream.handle(), bytes);
  if (scratch_->data() != nullptr) return;
  throw Error(ErrorKind::kFault, format("out of GPU memory: {} MiB to prove that {}", bytes >> 20, what),
              "use a smaller micro-batch or more ranks");
}

Proof::~Proof() {
  scratch_.reset();
  if (std::uncaught_exceptions() > 0) return;
  cudaStreamSynchronize(stream_.handle());  // which gives the pool's memory back
  auto& record = stream_.attachment<ProofRecord>();
  record.most_bytes = std::max(record.most_bytes, bytes_);
}

Proofs proofs(const Stream& stream) {
  return stream.cuda().attachment<ProofRecord>();
}

}  // namespace invar::ops::cuda
