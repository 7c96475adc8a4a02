#include "models/qwen3.h"

#include <cmath>

#include "config/units.h"

namespace invar {

DecoderSpec qwen3_spec(const ModelConfig& config) {
  DecoderSpec spec;
  spec.vocab_size = config.vocab_size;
  spec.hidden_size = config.hidden_size;
  spec.norm_eps = config.rms_norm_eps;
  spec.embedding = "model.embed_tokens.weight";
  spec.final_norm = "model.norm.weight";
  spec.head = config.tie_word_embeddings ? "" : "lm_head.weight";
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string prefix = format("model.layers.{}.", i);
    LayerSpec layer;
    layer.norm_eps = config.rms_norm_eps;
    layer.input_norm = prefix + "input_layernorm.weight";
    layer.mlp_norm = prefix + "post_attention_layernorm.weight";
    layer.rope = {config.rope_theta, config.head_dim, config.head_dim / 2};
    layer.kv_source = i;
    layer.attention.prefix = prefix + "self_attn.";
    layer.attention.hidden_size = config.hidden_size;
    layer.attention.query_heads = config.num_attention_heads;
    layer.attention.kv_heads = config.num_key_value_heads;
    layer.attention.head_dim = config.head_dim;
    layer.attention.norm_eps = config.rms_norm_eps;
    layer.attention.scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
    layer.mlp.prefix = prefix + "mlp.";
    layer.mlp.hidden_size = config.hidden_size;
    layer.mlp.intermediate_size = config.intermediate_size;
    layer.mlp.block_width = ffn_block_width(config.intermediate_size);
    spec.layers.push_back(std::move(layer));
  }
  return spec;
}

}  // namespace invar
