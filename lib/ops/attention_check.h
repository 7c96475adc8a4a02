#pragma once

#include "ops/attention.h"

namespace invar::ops {

// What every attention backend refuses, for a person; empty if nothing.
std::string common_attention_refusal(const AttentionParams& params, const HeadView& q, const HeadView& k);

// What cuDNN's attention (cuda/cudnn_attention.cpp) refuses whatever the GPU and the addresses are; empty if nothing.
std::string cudnn_attention_refusal(const AttentionParams& params, const HeadView& q, const HeadView& k);

// Shapes, dtypes and devices of one call. Throw Error{kFault} naming the operand.
void check_attention_forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                             const HeadView& v, const HeadView& out, const Tensor& lse);
void check_attention_backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                              const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out,
                              const Tensor& delta, const HeadView& d_q, const HeadView& d_k, const HeadView& d_v);

}  // namespace invar::ops
