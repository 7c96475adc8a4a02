#include "ops/proofs.h"

#include <algorithm>

#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {
namespace {

constexpr int64_t kBlock = 256;  // bytes that a place of an operand may lose to its alignment

}  // namespace

Proofs proofs(const Stream& stream) {
  return on_cuda(stream) ? cuda::proofs(stream) : Proofs{};
}

int64_t product_proof_bytes(int64_t bytes_a, int64_t bytes_b, int64_t bytes_added_to) {
  return bytes_a + bytes_b + bytes_added_to + 6 * kBlock;  // twice an operand: see aligned() of ops/cuda/matmul.cpp
}

int64_t attention_proof_bytes(const AttentionParams& params, const HeadView& q, std::initializer_list<HeadView> read) {
  constexpr int64_t kMostOperands = 8;
  const int64_t heads = 4 * q.heads_per_group + 4;  // q, out, their gradients; k, v, theirs
  int64_t bytes =
      params.sequence_length * (heads * q.head_dim * size_of(DType::kBF16) + q.heads_per_group * size_of(DType::kF32));
  for (const HeadView& view : read) {  // groups that coincide are copied apart
    const int64_t packed = view.tokens() * view.heads() * view.head_dim * size_of(view.buffer.dtype());
    bytes += std::max(view.buffer.bytes(), packed);
  }
  return bytes + (2 * kMostOperands + 2) * kBlock;
}

}  // namespace invar::ops
