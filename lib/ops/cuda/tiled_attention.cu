#include <initializer_list>
#include <string>

#include "ops/attention_check.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/tiled_attention.cuh"

namespace invar::ops::cuda {
namespace {

// Why the heads of a view cannot be read 16 bytes at a time; empty if they can.
std::string alignment_refusal(const HeadView& view) {
  const bool first = is_aligned({static_cast<const BF16*>(view.buffer.raw()) + view.offset});
  if (first && view.token_stride() % 8 == 0 && (view.groups == 1 || view.group_stride % 8 == 0)) return "";
  return format("heads at {} elements of rows of {}, groups {} apart, are not all aligned to 16 bytes", view.offset,
                view.token_stride(), view.group_stride);
}

void check_aligned(std::string_view op, std::initializer_list<const HeadView*> views) {
  for (const HeadView* view : views) {
    const std::string refusal = alignment_refusal(*view);
    INVAR_CHECK(refusal.empty(), "{}: {}", op, refusal);
  }
}

class TiledAttention : public AttentionBackend {
 public:
  std::string name() const override { return "tiled"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    const DType dtype = q.buffer.dtype();
    if (dtype != DType::kBF16) return format("it takes bf16, not {}", name_of(dtype));
    if (q.head_dim % 16 != 0 || q.head_dim > 512) {
      return format("head_dim is {}; it takes multiples of 16 up to 512", q.head_dim);
    }
    for (const HeadView* view : {&q, &k}) {
      const std::string refusal = alignment_refusal(*view);
      if (!refusal.empty()) return refusal;
    }
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const int shared = shared_bytes_per_block(device);
    if (shared < kTiledAttentionSharedBytes) {
      return format("the GPU has {} bytes of shared memory per block; it takes {}", shared, kTiledAttentionSharedBytes);
    }
    return common_attention_refusal(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
    if (q.tokens() == 0) return;
    check_aligned("tiled attention_forward", {&q, &k, &v, &out});
    launch_tiled_forward(stream, {AttentionSizes(params, q), InputHeads(q), InputHeads(k), InputHeads(v),
                                  OutputHeads(out), lse.data<float>()});
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    if (q.tokens() == 0) return;
    check_aligned("tiled attention_backward", {&q, &k, &v, &out, &d_out, &d_q, &d_k, &d_v});
    fill_attention_delta<__nv_bfloat16, 8>(stream, out, d_out, delta.data<float>());
    launch_tiled_backward(stream, {AttentionSizes(params, q), InputHeads(q), InputHeads(k), InputHeads(v),
                                   InputHeads(d_out), lse.data<float>(), delta.data<float>(),
                                   static_cast<int>(q.heads()), OutputHeads(d_q), OutputHeads(d_k), OutputHeads(d_v)});
  }
};

}  // namespace

const AttentionBackend& tiled_attention() {
  static const TiledAttention backend;
  return backend;
}

}  // namespace invar::ops::cuda
