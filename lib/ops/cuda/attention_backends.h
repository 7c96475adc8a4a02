#pragma once

#include "ops/attention.h"

// The ways to compute attention on a GPU. Each writes every element of its outputs in an order of sums that depends on
// nothing but its own head and sample.
namespace invar::ops::cuda {

// cuDNN's fused attention, bf16, with its deterministic backward; null in a build without cuDNN. On an invariant stream
// each plan is proved at its first use (cudnn_proof.h).
const AttentionBackend* cudnn_attention();
// Own tensor-core tiles, bf16: any head_dim to 512 that 16 divides, windows and documents.
const AttentionBackend& tiled_attention();
// Of its backward pass: bytes of terms that wait for their sum at a time, unless one sample's of one group are more.
// A larger call goes in parts.
constexpr int64_t kTiledTermBytes = 64 << 20;
// Own tiles in fp32 arithmetic, f32 and bf16, any head_dim to 512: parity runs and oracle on the device.
const AttentionBackend& plain_attention();

}  // namespace invar::ops::cuda
