#include "models/gemma4.h"

#include <cmath>

#include "config/layer_kinds.h"
#include "config/units.h"

namespace invar {
namespace {

constexpr int64_t kPadToken = 0;

AttentionSpec attention_spec(const ModelConfig& config, int64_t layer, const std::string& prefix) {
  const bool sliding = is_sliding(config, layer);
  AttentionSpec spec;
  spec.prefix = prefix + "self_attn.";
  spec.hidden_size = config.hidden_size;
  spec.query_heads = config.num_attention_heads;
  spec.kv_heads = layer_key_value_heads(config, layer);
  spec.head_dim = layer_head_dim(config, layer);
  spec.norm_eps = config.rms_norm_eps;
  spec.scale = 1.0;
  spec.window = sliding ? config.sliding_window : 0;
  spec.normed_values = true;
  spec.values_from_keys = !sliding && config.attention_k_eq_v;
  spec.borrows = shares_key_values(config, layer);
  return spec;
}

RopeSpec rope_spec(const ModelConfig& config, int64_t layer) {
  const int64_t d = layer_head_dim(config, layer);
  if (is_sliding(config, layer)) return {config.sliding_rope_theta, d, d / 2};
  return {config.rope_theta, d, static_cast<int64_t>(config.partial_rotary_factor * static_cast<double>(d) / 2)};
}

GatedMlpSpec mlp_spec(const ModelConfig& config, int64_t layer, const std::string& prefix) {
  GatedMlpSpec spec;
  spec.prefix = prefix + "mlp.";
  spec.hidden_size = config.hidden_size;
  spec.intermediate_size = layer_intermediate_size(config, layer);
  spec.block_width = ffn_block_width(spec.intermediate_size);
  spec.activation = ops::Activation::kGeluTanh;
  return spec;
}

LayerSpec layer_spec(const ModelConfig& config, int64_t i) {
  const std::string prefix = format("model.layers.{}.", i);
  LayerSpec layer;
  layer.norm_eps = config.rms_norm_eps;
  layer.input_norm = prefix + "input_layernorm.weight";
  layer.attention = attention_spec(config, i, prefix);
  layer.rope = rope_spec(config, i);
  layer.kv_source = key_value_source(config, i);
  layer.provides_kv = provides_key_values(config, i);
  layer.attention_output_norm = prefix + "post_attention_layernorm.weight";
  layer.mlp_norm = prefix + "pre_feedforward_layernorm.weight";
  layer.mlp = mlp_spec(config, i, prefix);
  layer.mlp_output_norm = prefix + "post_feedforward_layernorm.weight";
  layer.scalar = prefix + "layer_scalar";
  if (config.hidden_size_per_layer_input > 0) {
    layer.per_layer.gate = prefix + "per_layer_input_gate.weight";
    layer.per_layer.projection = prefix + "per_layer_projection.weight";
    layer.per_layer.hidden_size = config.hidden_size;
    layer.per_layer.width = config.hidden_size_per_layer_input;
    layer.per_layer.block = per_layer_block_width(layer.per_layer.width);
    layer.per_layer_output_norm = prefix + "post_per_layer_input_norm.weight";
  }
  return layer;
}

PerLayerEmbeddingSpec per_layer_spec(const ModelConfig& config) {
  PerLayerEmbeddingSpec spec;
  spec.table = "model.embed_tokens_per_layer.weight";
  spec.projection = "model.per_layer_model_projection.weight";
  spec.norm = "model.per_layer_projection_norm.weight";
  spec.vocab_size = config.vocab_size;
  spec.hidden_size = config.hidden_size;
  spec.layers = config.num_hidden_layers;
  spec.width = config.hidden_size_per_layer_input;
  spec.block = per_layer_block_width(spec.width);
  spec.norm_eps = config.rms_norm_eps;
  spec.scale = std::sqrt(static_cast<double>(spec.width));
  spec.frozen_token = kPadToken;
  return spec;
}

}  // namespace

DecoderSpec gemma4_spec(const ModelConfig& config) {
  DecoderSpec spec;
  spec.vocab_size = config.vocab_size;
  spec.hidden_size = config.hidden_size;
  spec.norm_eps = config.rms_norm_eps;
  spec.embedding = "model.embed_tokens.weight";
  spec.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  spec.frozen_token = kPadToken;
  if (config.hidden_size_per_layer_input > 0) spec.per_layer = per_layer_spec(config);
  spec.final_norm = "model.norm.weight";
  spec.head = config.tie_word_embeddings ? "" : "lm_head.weight";
  spec.softcap = config.final_logit_softcapping;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) spec.layers.push_back(layer_spec(config, i));
  return spec;
}

}  // namespace invar
