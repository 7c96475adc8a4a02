#include "models/decoder_model.h"

#include "device/device.h"
#include "models/gemma4.h"
#include "models/qwen3.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

// Hugging Face holds embedding scales in the dtype of the weights.
double rounded_scale(double scale, DType dtype) {
  const auto single = static_cast<float>(scale);
  return dtype == DType::kBF16 ? static_cast<float>(BF16(single)) : single;
}

}  // namespace

DecoderSpec decoder_spec(const ModelConfig& config) {
  if (config.family == "qwen3") return qwen3_spec(config);
  if (config.family == "gemma4") return gemma4_spec(config);
  throw Error(ErrorKind::kConfig, format("model.family = {} is not supported", config.family), "use qwen3 or gemma4");
}

DecoderModel::DecoderModel(const DecoderSpec& spec, const ProcessGroups& groups, const SumPolicy& sums,
                           const Options& options, const Memory& memory)
    : spec_(spec),
      sums_(sums),
      options_(options),
      replicas_(groups),
      region_(*groups.tensor, options.sequence_parallel, sums.token_block(), options.reduce_dtype) {
  const LayerSetup setup{table_, replicas_, sums, options.sequence_parallel};
  const VocabTable tokens =
      add_vocab_table(setup, spec.embedding, spec.vocab_size, spec.hidden_size, spec.frozen_token);
  const ops::LookupParams lookup{static_cast<float>(rounded_scale(spec.embedding_scale, options.dtype)),
                                 spec.frozen_token};
  if (!spec.per_layer.table.empty()) {
    spec_.per_layer.scale = rounded_scale(spec.per_layer.scale, options.dtype);
    per_layer_ = std::make_unique<PerLayerEmbedding>(setup, spec_.per_layer);
  }
  for (const LayerSpec& layer : spec.layers) layers_.emplace_back(setup, layer, ropes_[layer.rope]);
  final_norm_ = std::make_unique<RmsNorm>(setup, spec.final_norm, spec.hidden_size, spec.norm_eps);
  const bool tied = spec.head.empty();
  const WeightUse looked_up = tied ? table_.add_user(tokens.weight) : WeightUse(tokens.weight);
  embedding_ = std::make_unique<VocabEmbedding>(tokens, looked_up, lookup);
  head_ = std::make_unique<LmHead>(tied ? tokens : add_vocab_table(setup, spec.head, spec.vocab_size, spec.hidden_size),
                                   spec.softcap);
  saved_.resize(layers_.size());
  allocate(memory);
}

void DecoderModel::allocate(const Memory& memory) {
  table_.allocate(memory.parameters, memory.gradients, options_.dtype, sums_.gradient_layout());
  for (auto& [spec, rope] : ropes_) {
    rope.cos = memory.constants.allocate("rope cos", DType::kF32, {options_.sequence_length, spec.head_dim / 2});
    rope.sin = memory.constants.allocate("rope sin", DType::kF32, {options_.sequence_length, spec.head_dim / 2});
    ops::fill_rope_table(memory.stream, rope, spec.theta, spec.head_dim, spec.rotated_pairs);
  }
}

LayerContext DecoderModel::context(const Workspace& workspace, const MicroBatch& batch, TensorSink* sink, bool keep) {
  INVAR_CHECK(batch.sequence_length <= options_.sequence_length && batch.tokens.dim(0) % batch.sequence_length == 0,
              "micro-batch of {} tokens in sequences of {}", batch.tokens.dim(0), batch.sequence_length);
  region_.set_tokens(batch.tokens.dim(0));
  const auto& [stream, weights, gradients, saved, scratch] = workspace;
  const SumContext sums{stream, region_, scratch, options_.dtype, batch.sequence_length};
  return {sums, sums_, weights, gradients, saved, batch.document_starts, keep, sink};
}

// What outlives a layer of the pass, whatever is recomputed.
void DecoderModel::allocate_shared(const LayerContext& ctx, bool with_gradient) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!spec_.layers[i].provides_kv) continue;
    const int64_t tokens = region_.tokens();
    SharedKv& shared = shared_kv_[static_cast<int64_t>(i)];
    shared.kv = ctx.saved.allocate("shared k, v", ctx.activation, {tokens, layers_[i].kv_width()});
    if (!with_gradient) continue;
    shared.d_kv = ctx.saved.allocate("d shared k, v", DType::kF32, {tokens, layers_[i].kv_width()});
    ops::zero(ctx.stream, shared.d_kv);
  }
}

DecoderLayer::Shared DecoderModel::shared_with(const LayerContext& ctx, int64_t layer) const {
  DecoderLayer::Shared shared;
  const auto kv = shared_kv_.find(spec_.layers[static_cast<size_t>(layer)].kv_source);
  if (kv != shared_kv_.end()) shared.kv = &kv->second;
  if (per_layer_ == nullptr) return shared;
  shared.input = PerLayerEmbedding::of_layer(ctx, per_layer_saved_.inputs, layer);
  const Tensor& d_inputs = per_layer_saved_.d_inputs;
  if (d_inputs.defined()) shared.d_input = PerLayerEmbedding::of_layer(ctx, d_inputs, layer);
  return shared;
}

Tensor DecoderModel::forward_layers(const LayerContext& ctx, const MicroBatch& batch, bool keep) {
  const Range local = region_.local_tokens();
  const auto residual = [&] { return ctx.saved.allocate("h", ctx.activation, {local.size(), spec_.hidden_size}); };
  set_phase(ctx.stream, "embedding forward");
  Tensor h = residual();
  embedding_->forward(ctx, batch.tokens, h);
  if (per_layer_ != nullptr) {
    per_layer_saved_ = {};
    per_layer_->forward(ctx, batch.tokens, h, keep, per_layer_saved_);
  }
  allocate_shared(ctx, keep);
  for (size_t i = 0; i < layers_.size(); ++i) {
    set_phase(ctx.stream, format("layer {} forward", i));
    const Tensor h_out = residual();
    const DecoderLayer::Shared shared = shared_with(ctx, static_cast<int64_t>(i));
    if (keep && options_.recompute != RecomputeKind::kFull) {
      layers_[i].forward(ctx, shared, h, h_out, saved_[i]);
    } else {
      const ArenaScope discard(ctx.saved);
      layers_[i].forward(ctx, shared, h, h_out, saved_[i]);
    }
    h = h_out;
    offer(ctx, format("hidden.{}", i), h, local.begin);
  }
  return h;
}

void DecoderModel::backward_layers(const LayerContext& ctx, const MicroBatch& batch, const Tensor& d_h) {
  for (size_t i = layers_.size(); i-- > 0;) {
    set_phase(ctx.stream, format("layer {} backward", i));
    const ArenaScope scope(ctx.saved);
    const DecoderLayer::Shared shared = shared_with(ctx, static_cast<int64_t>(i));
    if (options_.recompute == RecomputeKind::kFull) layers_[i].forward(ctx, shared, saved_[i].h, Tensor(), saved_[i]);
    layers_[i].backward(ctx, shared, saved_[i], d_h);
    if (shared.kv != nullptr) offer(ctx, format("d_kv.{}", i), shared.kv->d_kv, 0);
  }
  set_phase(ctx.stream, "embedding backward");
  if (per_layer_ != nullptr) per_layer_->backward(ctx, batch.tokens, saved_.front().h, per_layer_saved_, d_h);
  embedding_->backward(ctx, batch.tokens, d_h);
}

std::vector<std::string> DecoderModel::explain_attention(const Workspace& workspace, const MicroBatch& batch) {
  const LayerContext ctx = context(workspace, batch, nullptr);
  std::vector<std::string> lines;
  for (size_t first = 0; first < layers_.size();) {
    const std::string how = layers_[first].explain_attention(ctx);
    size_t last = first;
    while (last + 1 < layers_.size() && layers_[last + 1].explain_attention(ctx) == how) ++last;
    lines.push_back(first == last ? format("layer {}: {}", first, how)
                                  : format("layers {} to {}: {}", first, last, how));
    first = last + 1;
  }
  return lines;
}

void DecoderModel::evaluate(const Workspace& workspace, const MicroBatch& batch, const Tensor& loss_sums,
                            TensorSink* sink) {
  const LayerContext ctx = context(workspace, batch, sink);
  const ArenaScope saved(ctx.saved);
  const ArenaScope scratch(ctx.scratch);
  const Tensor h = forward_layers(ctx, batch, false);
  const Tensor x = ctx.scratch.allocate("normed", ctx.activation, {h.dim(0), h.dim(1)});
  final_norm_->forward(ctx, h, x, ctx.scratch.allocate("rstd", DType::kF32, {h.dim(0)}));
  head_->loss(ctx, x, batch.labels, std::nullopt, loss_sums);
}

void DecoderModel::forward_backward(const Workspace& workspace, const MicroBatch& batch, float gradient_scale,
                                    const Tensor& loss_sums, int64_t first_sample, TensorSink* sink) {
  const LayerContext ctx = context(workspace, batch, sink, options_.recompute != RecomputeKind::kSelective);
  const ArenaScope saved(ctx.saved);
  const ArenaScope scratch(ctx.scratch);
  ctx.gradients.begin_micro_batch(ctx, first_sample);
  const Tensor h = forward_layers(ctx, batch, true);
  const Tensor d_h = ctx.scratch.allocate("d_h", ctx.activation, {h.dim(0), h.dim(1)});
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor rstd = ctx.scratch.allocate("rstd", DType::kF32, {h.dim(0)});
    const Tensor x = ctx.scratch.allocate("normed", ctx.activation, {h.dim(0), h.dim(1)});
    final_norm_->forward(ctx, h, x, rstd);
    set_phase(ctx.stream, "head");
    const Tensor d_x = head_->loss(ctx, x, batch.labels, gradient_scale, loss_sums);
    final_norm_->backward(ctx, d_x, h, rstd, ops::Write::kSet, d_h);
  }
  backward_layers(ctx, batch, d_h);
  set_phase(ctx.stream, "gradients of norms");
  ctx.gradients.end_micro_batch(ctx);
}

}  // namespace invar
