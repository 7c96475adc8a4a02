#include "models/decoder_layer.h"

#include "ops/elementwise.h"

namespace invar {
namespace {

Tensor like(Arena& arena, std::string_view label, const Tensor& x) {
  return arena.allocate(label, x.dtype(), {x.dim(0), x.dim(1)});
}

}  // namespace

DecoderLayer::DecoderLayer(ParameterTable& table, ReplicaGroups& replicas, const LayerSpec& spec,
                           const ops::RopeTable& rope, bool sequence_parallel)
    : input_norm_(table, replicas, spec.input_norm, spec.attention.hidden_size, spec.norm_eps, sequence_parallel),
      attention_(table, replicas, spec.attention, rope),
      post_attention_norm_(table, replicas, spec.post_attention_norm, spec.attention.hidden_size, spec.norm_eps,
                           sequence_parallel),
      mlp_(table, *replicas.tensor(), spec.mlp) {}

void DecoderLayer::forward(const LayerContext& ctx, const Tensor& h, const Tensor& h_out, Saved& saved) const {
  saved.h = h;
  saved.rstd = ctx.saved.allocate("rstd", DType::kF32, {h.dim(0)});
  saved.h_mid = like(ctx.saved, "h mid", h);
  saved.rstd_mid = ctx.saved.allocate("rstd", DType::kF32, {h.dim(0)});
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x = like(ctx.scratch, "normed", h);
    input_norm_.forward(ctx, h, x, saved.rstd);
    ops::add(ctx.stream, h, attention_.forward(ctx, x, saved.attention), saved.h_mid);
  }
  const ArenaScope scope(ctx.scratch);
  const Tensor x = like(ctx.scratch, "normed", h);
  post_attention_norm_.forward(ctx, saved.h_mid, x, saved.rstd_mid);
  if (h_out.defined()) {
    ops::add(ctx.stream, saved.h_mid, mlp_.forward(ctx, x, saved.mlp), h_out);
  } else {
    mlp_.forward_saved(ctx, x, saved.mlp);
  }
}

void DecoderLayer::backward(const LayerContext& ctx, Saved& saved, const Tensor& d_h) const {
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x = like(ctx.scratch, "normed", saved.h_mid);
    post_attention_norm_.forward(ctx, saved.h_mid, x, saved.rstd_mid);
    const Tensor d_x = mlp_.backward(ctx, x, saved.mlp, d_h);
    post_attention_norm_.backward(ctx, d_x, saved.h_mid, saved.rstd_mid, d_h);
  }
  const ArenaScope scope(ctx.scratch);
  const Tensor x = like(ctx.scratch, "normed", saved.h);
  input_norm_.forward(ctx, saved.h, x, saved.rstd);
  const Tensor d_x = attention_.backward(ctx, x, saved.attention, d_h);
  input_norm_.backward(ctx, d_x, saved.h, saved.rstd, d_h);
}

}  // namespace invar
