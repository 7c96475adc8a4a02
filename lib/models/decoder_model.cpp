#include "models/decoder_model.h"

#include "models/qwen3.h"
#include "ops/elementwise.h"

namespace invar {

DecoderSpec decoder_spec(const ModelConfig& config) {
  if (config.family == "qwen3") return qwen3_spec(config);
  throw Error(ErrorKind::kConfig, format("model.family = {} is not supported", config.family), "use qwen3");
}

DecoderModel::DecoderModel(const DecoderSpec& spec, const ProcessGroups& groups, const Options& options)
    : spec_(spec),
      options_(options),
      replicas_(groups),
      region_(*groups.tensor, options.sequence_parallel),
      weights_(table_) {
  const VocabTable tokens = add_vocab_table(table_, *groups.tensor, spec.embedding, spec.vocab_size, spec.hidden_size);
  embedding_ = std::make_unique<VocabEmbedding>(tokens);
  for (const LayerSpec& layer : spec.layers) {
    const ops::RopeTable& rope = ropes_[{layer.rope_theta, layer.attention.head_dim}];
    layers_.emplace_back(table_, replicas_, layer, rope, options.sequence_parallel);
  }
  final_norm_ = std::make_unique<RmsNorm>(table_, replicas_, spec.final_norm, spec.hidden_size, spec.norm_eps,
                                          options.sequence_parallel);
  head_ = std::make_unique<LmHead>(
      spec.head.empty() ? tokens
                        : add_vocab_table(table_, *groups.tensor, spec.head, spec.vocab_size, spec.hidden_size));
  saved_.resize(layers_.size());
}

void DecoderModel::allocate(Arena& parameters, Arena& gradients, Arena& constants) {
  table_.allocate(parameters, gradients, options_.dtype);
  for (auto& [key, rope] : ropes_) {
    const auto& [theta, head_dim] = key;
    rope.cos = constants.allocate("rope cos", DType::kF32, {options_.sequence_length, head_dim / 2});
    rope.sin = constants.allocate("rope sin", DType::kF32, {options_.sequence_length, head_dim / 2});
    ops::fill_rope_table(rope, theta, head_dim);
  }
}

LayerContext DecoderModel::context(const Workspace& workspace, const MicroBatch& batch, TensorSink* sink) {
  INVAR_CHECK(batch.sequence_length <= options_.sequence_length && batch.tokens.dim(0) % batch.sequence_length == 0,
              "micro-batch of {} tokens in sequences of {}", batch.tokens.dim(0), batch.sequence_length);
  region_.set_tokens(batch.tokens.dim(0));
  return {workspace.stream,      region_, weights_, workspace.saved, workspace.scratch, options_.dtype,
          batch.sequence_length, sink};
}

Tensor DecoderModel::forward_layers(const LayerContext& ctx, const MicroBatch& batch, bool keep) {
  const Range local = region_.local_tokens();
  const auto residual = [&] { return ctx.saved.allocate("h", ctx.activation, {local.size(), spec_.hidden_size}); };
  Tensor h = residual();
  embedding_->forward(ctx, batch.tokens, h);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Tensor h_out = residual();
    if (keep && options_.recompute == RecomputeKind::kNone) {
      layers_[i].forward(ctx, h, h_out, saved_[i]);
    } else {
      const ArenaScope discard(ctx.saved);
      layers_[i].forward(ctx, h, h_out, saved_[i]);
    }
    h = h_out;
    const std::string name = format("hidden.{}", i);
    if (ctx.sink != nullptr && ctx.sink->wants(name)) ctx.sink->record(name, h, local.begin);
  }
  return h;
}

void DecoderModel::backward_layers(const LayerContext& ctx, const MicroBatch& batch, const Tensor& d_h) {
  for (size_t i = layers_.size(); i-- > 0;) {
    const ArenaScope scope(ctx.saved);
    if (options_.recompute == RecomputeKind::kFull) layers_[i].forward(ctx, saved_[i].h, Tensor(), saved_[i]);
    layers_[i].backward(ctx, saved_[i], d_h);
  }
  embedding_->backward(ctx, batch.tokens, d_h);
}

double DecoderModel::evaluate(const Workspace& workspace, const MicroBatch& batch, TensorSink* sink) {
  const LayerContext ctx = context(workspace, batch, sink);
  const ArenaScope saved(ctx.saved);
  const ArenaScope scratch(ctx.scratch);
  const Tensor h = forward_layers(ctx, batch, false);
  const Tensor x = ctx.scratch.allocate("normed", ctx.activation, {h.dim(0), h.dim(1)});
  final_norm_->forward(ctx, h, x, ctx.scratch.allocate("rstd", DType::kF32, {h.dim(0)}));
  return head_->loss(ctx, x, batch.labels, std::nullopt).loss_sum;
}

double DecoderModel::forward_backward(const Workspace& workspace, const MicroBatch& batch, float gradient_scale,
                                      TensorSink* sink) {
  const LayerContext ctx = context(workspace, batch, sink);
  const ArenaScope saved(ctx.saved);
  const ArenaScope scratch(ctx.scratch);
  const Tensor h = forward_layers(ctx, batch, true);
  const Tensor d_h = ctx.scratch.allocate("d_h", ctx.activation, {h.dim(0), h.dim(1)});
  ops::zero(ctx.stream, d_h);
  double loss = 0;
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor rstd = ctx.scratch.allocate("rstd", DType::kF32, {h.dim(0)});
    const Tensor x = ctx.scratch.allocate("normed", ctx.activation, {h.dim(0), h.dim(1)});
    final_norm_->forward(ctx, h, x, rstd);
    const LmHead::Result result = head_->loss(ctx, x, batch.labels, gradient_scale);
    loss = result.loss_sum;
    final_norm_->backward(ctx, result.d_x, h, rstd, d_h);
  }
  backward_layers(ctx, batch, d_h);
  return loss;
}

}  // namespace invar
