#include "ops/attention_check.h"

#include "ops/dispatch.h"

namespace invar::ops {
namespace {

// cuDNN: below this share of the sequence a window costs less in tiles that skip the rest (tools/bench_cuda: D=256,
// S=4096).
constexpr int64_t kWindowShare = 5;

// The view that k, v and their gradients must be like: one head per group of q.
HeadView one_head_per_group(HeadView q) {
  q.heads_per_group = 1;
  return q;
}

void check_forward_operands(std::string_view op, const Stream& stream, const AttentionParams& params, const HeadView& q,
                            const HeadView& k, const HeadView& v, const HeadView& out, const Tensor& lse) {
  expect_heads(op, "q", q);
  expect_heads_like(op, "k", k, one_head_per_group(q), Groups::kMayCoincide);
  expect_heads_like(op, "v", v, one_head_per_group(q), Groups::kMayCoincide);
  expect_heads_like(op, "out", out, q);
  expect(op, "lse", lse, DType::kF32, {q.tokens(), q.heads()});
  const Tensor& starts = params.document_starts;
  if (starts.defined()) expect(op, "document_starts", starts, DType::kI32, {q.tokens()});
  expect_on(op, stream, {&q.buffer, &k.buffer, &v.buffer, &out.buffer, &lse, &starts});
  const std::string refusal = common_attention_refusal(params, q, k);
  INVAR_CHECK(refusal.empty(), "{}: {}", op, refusal);
}

}  // namespace

std::string common_attention_refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  if (params.window < 0) {
    return format("the window is {}; it must be 0 (every earlier key) or a positive number of keys", params.window);
  }
  if (params.sequence_length <= 0 || q.tokens() % params.sequence_length != 0) {
    return format("{} tokens are not whole samples of {}", q.tokens(), params.sequence_length);
  }
  if (q.buffer.dtype() != k.buffer.dtype()) {
    return format("q is {} and k {}; they must have one dtype", name_of(q.buffer.dtype()), name_of(k.buffer.dtype()));
  }
  return "";
}

std::string cudnn_attention_refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  if (std::string refusal = common_attention_refusal(params, q, k); !refusal.empty()) return refusal;
  if (q.buffer.dtype() != DType::kBF16) return "it computes in bf16 only";
  if (params.document_starts.defined()) return "it does not know documents inside a sample";
  if (!(params.scale > 0)) return format("the scale is {}; it takes positive ones", params.scale);
  if (params.window > 0 && kWindowShare * params.window < params.sequence_length) {
    return format("its deterministic backward computes what a window of {} in {} hides", params.window,
                  params.sequence_length);
  }
  if (q.head_dim % 8 != 0 || q.head_dim > 256) return "head_dim must be a multiple of 8 and at most 256";
  return "";
}

void check_attention_forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                             const HeadView& v, const HeadView& out, const Tensor& lse) {
  check_forward_operands("attention_forward", stream, params, q, k, v, out, lse);
}

void check_attention_backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                              const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out,
                              const Tensor& delta, const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) {
  constexpr std::string_view kOp = "attention_backward";
  check_forward_operands(kOp, stream, params, q, k, v, out, lse);
  expect_heads_like(kOp, "d_out", d_out, q);
  expect(kOp, "delta", delta, DType::kF32, {q.tokens(), q.heads()});
  expect_heads_like(kOp, "d_q", d_q, q);
  expect_heads_like(kOp, "d_k", d_k, one_head_per_group(q));
  expect_heads_like(kOp, "d_v", d_v, one_head_per_group(q));
  expect_on(kOp, stream, {&d_out.buffer, &delta, &d_q.buffer, &d_k.buffer, &d_v.buffer});
}

}  // namespace invar::ops
