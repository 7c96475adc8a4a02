#pragma once

#include "device/stream.h"
#include "ops/head_view.h"

namespace invar::ops {

// RMSNorm over the last dim: y = x · rstd · weight, rstd = (mean(x²) + eps)^(-1/2), all in fp32, rounded once to y.
// x, y (T, C) f32 or bf16; weight (C) of x's dtype; rstd f32 (T), written.
void rms_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, float eps, const Tensor& y,
                      const Tensor& rstd);

// The same of x = a + b, which is rounded and written to sum first.
void add_rms_norm_forward(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& weight, float eps,
                          const Tensor& sum, const Tensor& y, const Tensor& rstd);

// Whether a gradient is written or added to what is there.
enum class Write : bool { kSet, kAdd };

// With u = x·rstd, g = dy·weight: dx = rstd·(g − u·mean(g·u)) is written or added to d_x, which has x's dtype;
// d_weight f32 (C) or (blocks, C), where the T tokens are `blocks` equal runs: d_weight[b] += Σ dy·u over the tokens of
// run b, ascending. (C) is one block. The bits of d_weight[b] are those of a call with its tokens alone, whatever T,
// the number of blocks and the threads. With kSet, d_x may be d_y's own buffer. Error{kFault} if blocks does not divide
// T.
void rms_norm_backward(const Stream& stream, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, Write write, const Tensor& d_x, const Tensor& d_weight);

// cos and sin of position · inv_freq(i): f32 (S, D/2) each, inv_freq(i) = theta^(-2i/D) for i < rotated_pairs, else 0
// (proportional RoPE: those pairs stand still; D/2 turns all). inv_freq in fp32, angles and functions from fp64 of
// that product rounded to fp32.
struct RopeTable {
  Tensor cos;
  Tensor sin;
};
void fill_rope_table(const Stream& stream, const RopeTable& table, double theta, int64_t head_dim,
                     int64_t rotated_pairs);

// What happens to a head before attention: RMSNorm over D, with a weight (D) or without one (undefined), then
// rotate-half RoPE (pairs (i, i + D/2)) at position t mod sequence_length, if there is a table. With document_starts it
// is at position t mod sequence_length − document_starts[t]: i32 (T), each from 0 to t mod sequence_length.
struct HeadNormRope {
  Tensor weight;
  float eps = 1e-6f;
  const RopeTable* rope = nullptr;
  int64_t sequence_length = 0;
  Tensor document_starts{};
};

// fp32 inside, one rounding. in and out may be the same buffer.
void head_norm_rope_forward(const Stream& stream, const HeadNormRope& params, const HeadView& in, const HeadView& out);
// d_in from d_out and the raw input `in`. If there is a weight, its gradient is added to d_weight: f32 (D), over tokens
// (ascending) and heads (ascending within a token); or f32 (heads, blocks, D), where the tokens are `blocks` equal runs
// and d_weight[h][b] += the terms of head h over the tokens of run b, ascending, with bits that depend on those terms
// alone. d_in and d_out may be the same buffer. Error{kFault} if blocks does not divide the tokens.
void head_norm_rope_backward(const Stream& stream, const HeadNormRope& params, const HeadView& d_out,
                             const HeadView& in, Write write, const HeadView& d_in, const Tensor& d_weight);

}  // namespace invar::ops
