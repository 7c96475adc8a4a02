#include "config/presets.h"

#include <array>

#include "config/suggest.h"
#include "core/error.h"

namespace invar {
namespace {

struct Size {
  std::string_view name;
  int64_t hidden, layers, query_heads, kv_heads, intermediate;
  bool tied;
};

// The published Qwen3 releases of April 2025.
constexpr std::array<Size, 6> kSizes = {{
    {"qwen3-0.6b", 1024, 28, 16, 8, 3072, true},
    {"qwen3-1.7b", 2048, 28, 16, 8, 6144, true},
    {"qwen3-4b", 2560, 36, 32, 8, 9728, true},
    {"qwen3-8b", 4096, 36, 32, 8, 12288, false},
    {"qwen3-14b", 5120, 40, 40, 8, 17408, false},
    {"qwen3-32b", 5120, 64, 64, 8, 25600, false},
}};

// Models that a user may well ask for.
constexpr std::array<std::string_view, 2> kNotYet = {"qwen3-30b-a3b", "qwen3-235b-a22b"};

ModelConfig model_of(const Size& size, std::string_view name) {
  ModelConfig model;
  model.preset = name;
  model.vocab_size = 151936;
  model.hidden_size = size.hidden;
  model.intermediate_size = size.intermediate;
  model.num_hidden_layers = size.layers;
  model.num_attention_heads = size.query_heads;
  model.num_key_value_heads = size.kv_heads;
  model.head_dim = 128;
  model.max_position_embeddings = 40960;
  model.rms_norm_eps = 1e-6;
  model.rope_theta = 1e6;
  model.initializer_range = 0.02;
  model.tie_word_embeddings = size.tied;
  return model;
}

}  // namespace

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const Size& size : kSizes) names.push_back(size.name);
  return names;
}

ModelConfig preset_model(std::string_view name) {
  for (const Size& size : kSizes) {
    if (size.name == name) return model_of(size, name);
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
  if (name.starts_with("gemma")) {
    throw Error(ErrorKind::kConfig, format("model.preset {}: the gemma family is not supported yet", name),
                format("use {}", all));
  }
  const std::string_view nearest = nearest_word(name, names);
  throw Error(ErrorKind::kConfig, format("unknown model.preset {}", name),
              nearest.empty() ? format("use {}", all) : format("did you mean {}? The presets are {}", nearest, all));
}

}  // namespace invar
