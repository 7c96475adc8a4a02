#include "config/presets.h"

#include <array>

#include "config/suggest.h"
#include "core/error.h"

namespace invar {
namespace {

// The published Qwen3 releases of April 2025.
struct Qwen3Size {
  std::string_view name;
  int64_t hidden, layers, query_heads, kv_heads, intermediate;
  bool tied;
};
constexpr std::array<Qwen3Size, 6> kQwen3 = {{
    {"qwen3-0.6b", 1024, 28, 16, 8, 3072, true},
    {"qwen3-1.7b", 2048, 28, 16, 8, 6144, true},
    {"qwen3-4b", 2560, 36, 32, 8, 9728, true},
    {"qwen3-8b", 4096, 36, 32, 8, 12288, false},
    {"qwen3-14b", 5120, 40, 40, 8, 17408, false},
    {"qwen3-32b", 5120, 64, 64, 8, 25600, false},
}};

// The text models of the Gemma 4 releases. Two kinds: per-layer inputs with shared keys and values, or full layers that
// take the values from the keys and have their own number of heads.
struct Gemma4Size {
  std::string_view name;
  int64_t hidden, layers, query_heads, kv_heads, global_kv_heads, intermediate;
  std::string_view layer_types;
  int64_t window, max_position, shared_layers;
  bool double_wide;
  int64_t per_layer_input;
};
constexpr std::array<Gemma4Size, 4> kGemma4 = {{
    {"gemma4-e2b", 1536, 35, 8, 1, 0, 6144, "ssssf", 512, 131072, 20, true, 256},
    {"gemma4-e4b", 2560, 42, 8, 2, 0, 10240, "sssssf", 512, 131072, 18, false, 256},
    {"gemma4-12b", 3840, 48, 16, 8, 1, 15360, "sssssf", 1024, 262144, 0, false, 0},
    {"gemma4-31b", 5376, 60, 32, 16, 4, 21504, "sssssf", 1024, 262144, 0, false, 0},
}};

// Models that a user may well ask for.
constexpr std::array<std::string_view, 3> kNotYet = {"qwen3-30b-a3b", "qwen3-235b-a22b", "gemma4-26b-a4b"};

// What both families have.
template <class Size>
ModelConfig common_of(const Size& size) {
  ModelConfig model;
  model.preset = size.name;
  model.hidden_size = size.hidden;
  model.intermediate_size = size.intermediate;
  model.num_hidden_layers = size.layers;
  model.num_attention_heads = size.query_heads;
  model.num_key_value_heads = size.kv_heads;
  model.rms_norm_eps = 1e-6;
  model.rope_theta = 1e6;
  model.initializer_range = 0.02;
  return model;
}

ModelConfig model_of(const Qwen3Size& size) {
  ModelConfig model = common_of(size);
  model.family = "qwen3";
  model.vocab_size = 151936;
  model.head_dim = 128;
  model.max_position_embeddings = 40960;
  model.tie_word_embeddings = size.tied;
  return model;
}

ModelConfig model_of(const Gemma4Size& size) {
  ModelConfig model = common_of(size);
  model.family = "gemma4";
  model.vocab_size = 262144;
  model.head_dim = 256;
  model.max_position_embeddings = size.max_position;
  model.tie_word_embeddings = true;
  model.layer_types = size.layer_types;
  model.sliding_window = size.window;
  model.sliding_rope_theta = 1e4;
  model.global_head_dim = 512;
  model.num_global_key_value_heads = size.global_kv_heads;
  model.partial_rotary_factor = 0.25;
  model.attention_k_eq_v = size.global_kv_heads > 0;
  model.num_kv_shared_layers = size.shared_layers;
  model.use_double_wide_mlp = size.double_wide;
  model.hidden_size_per_layer_input = size.per_layer_input;
  model.final_logit_softcapping = 30.0;
  return model;
}

}  // namespace

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const Qwen3Size& size : kQwen3) names.push_back(size.name);
  for (const Gemma4Size& size : kGemma4) names.push_back(size.name);
  return names;
}

ModelConfig preset_model(std::string_view name) {
  for (const Qwen3Size& size : kQwen3) {
    if (size.name == name) return model_of(size);
  }
  for (const Gemma4Size& size : kGemma4) {
    if (size.name == name) return model_of(size);
  }
  const std::vector<std::string_view> names = preset_names();
  const std::string all = join_words(names);
  for (std::string_view known : kNotYet) {
    if (name == known) {
      throw Error(ErrorKind::kConfig,
                  format("model.preset {} is a mixture of experts, which is not supported yet", name),
                  format("use a dense size: {}", all));
    }
  }
  const std::string_view nearest = nearest_word(name, names);
  throw Error(ErrorKind::kConfig, format("unknown model.preset {}", name),
              nearest.empty() ? format("use {}", all) : format("did you mean {}? The presets are {}", nearest, all));
}

}  // namespace invar
