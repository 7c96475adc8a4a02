#pragma once

#include "ops/attention.h"

namespace invar::ops::cpu {

// Attention on the CPU for f32 and bf16 and any head_dim: tiles of queries × keys, online softmax (Milakov and
// Gimelshein 2018, Dao et al. 2022), and none of the work of tiles that causality, the window or the document hides.
//
// Bits: a score is one chain of fp32 fused multiply-adds over ascending d; d_q is one over ascending keys, d_k and d_v
// over ascending (query head of the group, query). Tiles start at the start of a sample. So a head or a sample has the
// same bits alone as in any call, at any number of threads.
// Scratch per thread: a dozen tiles; in backward also d_k and d_v of one sample and group, in fp32.
// The outputs of backward must not overlap its inputs.
const AttentionBackend& tiled_attention();

}  // namespace invar::ops::cpu
