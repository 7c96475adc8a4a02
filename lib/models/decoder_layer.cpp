#include "models/decoder_layer.h"

#include "ops/elementwise.h"

namespace invar {
namespace {

Tensor like(Arena& arena, std::string_view label, const Tensor& x) {
  return arena.allocate(label, x.dtype(), {x.dim(0), x.dim(1)});
}

Tensor row_statistics(Arena& arena, const Tensor& x) {
  return arena.allocate("rstd", DType::kF32, {x.dim(0)});
}

// A factor of the checkpoint, the same on every rank, that is applied but not trained.
WeightId add_scalar(const LayerSetup& setup, const std::string& name) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = {1};
  parameter.init = Init::kOnes;
  parameter.runs = {{{0, 1}, 0}};
  setup.sums.set_copies(parameter, setup.tensor(), false);
  parameter.trained = false;
  Weight weight;
  weight.name = name;
  weight.rows = 1;
  weight.cols = 1;
  weight.decay = false;
  weight.users = 0;
  weight.parameters = {std::move(parameter)};
  return setup.table.add(std::move(weight));
}

}  // namespace

DecoderLayer::DecoderLayer(const LayerSetup& setup, const LayerSpec& spec, const ops::RopeTable& rope)
    : input_norm_(setup, spec.input_norm, spec.attention.hidden_size, spec.norm_eps),
      attention_(setup, spec.attention, rope),
      mlp_norm_(setup, spec.mlp_norm, spec.attention.hidden_size, spec.norm_eps),
      mlp_(setup, spec.mlp) {
  const auto add_norm = [&](std::optional<RmsNorm>& norm, const std::string& name) {
    if (!name.empty()) norm.emplace(setup, name, spec.attention.hidden_size, spec.norm_eps);
  };
  add_norm(attention_output_norm_, spec.attention_output_norm);
  add_norm(mlp_output_norm_, spec.mlp_output_norm);
  if (!spec.per_layer.gate.empty()) per_layer_.emplace(setup, spec.per_layer);
  add_norm(per_layer_output_norm_, spec.per_layer_output_norm);
  if (!spec.scalar.empty()) scalar_ = add_scalar(setup, spec.scalar);
}

// h_out = h + [norm](branch). Without h_out, only what backward needs of it.
void DecoderLayer::add_output(const LayerContext& ctx, const std::optional<RmsNorm>& norm, const Tensor& h,
                              const Tensor& branch, OutputNorm& saved, const Tensor& h_out) const {
  if (!norm) {
    if (h_out.defined()) ops::add(ctx.stream, h, branch, h_out);
    return;
  }
  saved.x = like(ctx.saved, "branch output", h);
  saved.rstd = row_statistics(ctx.saved, h);
  ops::copy(ctx.stream, branch, saved.x);
  const ArenaScope scope(ctx.scratch);
  const Tensor normed = like(ctx.scratch, "normed", h);
  norm->forward(ctx, saved.x, normed, saved.rstd);
  if (h_out.defined()) ops::add(ctx.stream, h, normed, h_out);
}

// The gradient of what came before [norm]: d_h itself or on top of scratch.
Tensor DecoderLayer::branch_gradient(const LayerContext& ctx, const std::optional<RmsNorm>& norm,
                                     const OutputNorm& saved, const Tensor& d_h) const {
  if (!norm) return d_h;
  const Tensor d_branch = like(ctx.scratch, "d_branch", d_h);
  norm->backward(ctx, d_h, saved.x, saved.rstd, ops::Write::kSet, d_branch);
  return d_branch;
}

void DecoderLayer::forward(const LayerContext& ctx, const Shared& shared, const Tensor& h, const Tensor& h_out,
                           Saved& saved) const {
  saved.h = h;
  saved.rstd = row_statistics(ctx.saved, h);
  saved.h_mid = like(ctx.saved, "h mid", h);
  saved.rstd_mid = row_statistics(ctx.saved, h);
  if (per_layer_) saved.h_late = like(ctx.saved, "h late", h);
  {
    const ArenaScope scope(ctx.scratch);
    // With ctx.keep what the branches take stays: here, or where it is gathered.
    const bool stays = ctx.keep && !ctx.region.gathers();
    const Tensor x = like(stays ? ctx.saved : ctx.scratch, "normed", h);
    const Tensor x_mid = stays ? like(ctx.saved, "normed mid", h) : x;
    input_norm_.forward(ctx, h, x, saved.rstd);
    {
      const ArenaScope branch_scope(ctx.scratch);
      const Tensor branch = attention_.forward(ctx, x, shared.kv, saved.attention);
      if (attention_output_norm_) {
        add_output(ctx, attention_output_norm_, h, branch, saved.attention_output, saved.h_mid);
        mlp_norm_.forward(ctx, saved.h_mid, x_mid, saved.rstd_mid);
      } else {
        mlp_norm_.add_forward(ctx, h, branch, saved.h_mid, x_mid, saved.rstd_mid);
      }
    }
    const Tensor after = per_layer_ ? saved.h_late : h_out;
    if (after.defined() || mlp_output_norm_) {
      const Tensor branch = mlp_.forward(ctx, x_mid, saved.mlp);
      add_output(ctx, mlp_output_norm_, saved.h_mid, branch, saved.mlp_output, after);
    } else {
      mlp_.forward_saved(ctx, x_mid, saved.mlp);
    }
  }
  if (per_layer_) per_layer_forward(ctx, shared, h_out, saved);
  if (scalar_ && h_out.defined()) ops::scale_by(ctx.stream, ctx.forward_weight(*scalar_).value(), h_out);
}

void DecoderLayer::per_layer_forward(const LayerContext& ctx, const Shared& shared, const Tensor& h_out,
                                     Saved& saved) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor branch = per_layer_->forward(ctx, saved.h_late, shared.input, saved.per_layer);
  add_output(ctx, per_layer_output_norm_, saved.h_late, branch, saved.per_layer_output, h_out);
}

void DecoderLayer::per_layer_backward(const LayerContext& ctx, const Shared& shared, Saved& saved,
                                      const Tensor& d_h) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor d_branch = branch_gradient(ctx, per_layer_output_norm_, saved.per_layer_output, d_h);
  ops::add(ctx.stream, d_h,
           per_layer_->backward(ctx, saved.h_late, shared.input, saved.per_layer, d_branch, shared.d_input), d_h);
}

// The input of a branch: kept, or on top of scratch.
Tensor DecoderLayer::branch_input(const LayerContext& ctx, const RmsNorm& norm, const Tensor& h, const Tensor& rstd,
                                  const Tensor& kept) {
  if (ctx.keep) return kept;
  const Tensor x = like(ctx.scratch, "normed", h);
  norm.forward(ctx, h, x, rstd);
  return x;
}

void DecoderLayer::backward(const LayerContext& ctx, const Shared& shared, Saved& saved, const Tensor& d_h) const {
  if (scalar_) ops::scale_by(ctx.stream, ctx.backward_weight(*scalar_).value(), d_h);
  if (per_layer_) per_layer_backward(ctx, shared, saved, d_h);
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor d_branch = branch_gradient(ctx, mlp_output_norm_, saved.mlp_output, d_h);
    const Tensor x = branch_input(ctx, mlp_norm_, saved.h_mid, saved.rstd_mid, saved.mlp.x);
    const Tensor d_x = mlp_.backward(ctx, x, saved.mlp, d_branch);
    mlp_norm_.backward(ctx, d_x, saved.h_mid, saved.rstd_mid, ops::Write::kAdd, d_h);
  }
  const ArenaScope scope(ctx.scratch);
  const Tensor d_branch = branch_gradient(ctx, attention_output_norm_, saved.attention_output, d_h);
  const Tensor x = branch_input(ctx, input_norm_, saved.h, saved.rstd, saved.attention.x);
  const Tensor d_x = attention_.backward(ctx, x, shared.kv, saved.attention, d_branch);
  input_norm_.backward(ctx, d_x, saved.h, saved.rstd, ops::Write::kAdd, d_h);
}

}  // namespace invar
