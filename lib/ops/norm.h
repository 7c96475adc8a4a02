#pragma once

#include "device/stream.h"
#include "ops/head_view.h"

namespace invar::ops {

// RMSNorm over the last dim: y = x · rstd · weight, rstd = (mean(x²) + eps)^(-1/2), all in fp32, rounded once to y.
// x, y (T, C) f32 or bf16; weight (C) of x's dtype; rstd f32 (T), written.
void rms_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, float eps, const Tensor& y,
                      const Tensor& rstd);

// With u = x·rstd, g = dy·weight: dx = rstd·(g − u·mean(g·u)) is added to d_x; d_weight += Σ_tokens dy·u.
// d_x has x's dtype and holds the gradient of the residual path on entry. d_weight f32 (C); tokens are summed
// in ascending order per column, whatever the thread count.
void rms_norm_backward(const Stream& stream, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, const Tensor& d_x, const Tensor& d_weight);

// cos and sin of position · theta^(-2i/D): f32 (S, D/2) each. inv_freq in fp32, angles and functions from fp64 of
// that product rounded to fp32.
struct RopeTable {
  Tensor cos;
  Tensor sin;
};
void fill_rope_table(const RopeTable& table, double theta, int64_t head_dim);

// Per head: RMSNorm over D (skipped if weight is undefined), then rotate-half RoPE (pairs (i, i + D/2); skipped if
// rope is null) at position t mod sequence_length. fp32 inside, one rounding. in and out may be the same buffer.
void head_norm_rope_forward(const Stream& stream, const HeadView& in, const Tensor& weight, float eps,
                            const RopeTable* rope, int64_t sequence_length, const HeadView& out);
// d_in from d_out and the raw input `in`; d_weight f32 (D) += Σ over tokens (ascending) and heads (ascending within a
// token). d_in and d_out may be the same buffer.
void head_norm_rope_backward(const Stream& stream, const HeadView& d_out, const HeadView& in, const Tensor& weight,
                             float eps, const RopeTable* rope, int64_t sequence_length, const HeadView& d_in,
                             const Tensor& d_weight);

}  // namespace invar::ops
