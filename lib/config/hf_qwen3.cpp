#include <nlohmann/json.hpp>
#include <optional>

#include "config/hf_families.h"
#include "core/shown.h"

namespace invar {
namespace {

using Json = nlohmann::ordered_json;

// The rotary settings of one dictionary; true for the plain rotation, written {"rope_type": "default"} or not at all.
bool is_plain_rope(const JsonObject& rope) {
  for (const char* name : {"rope_type", "type"}) {
    if (rope.text(name, "default") != "default") return false;
  }
  return rope.number("partial_rotary_factor", 1.0) == 1.0;
}

// transformers 4 writes rope_theta at the top level and rope_scaling beside it, 5 writes both into rope_parameters.
double read_rope_theta(const JsonObject& text) {
  const char* key = "rope_theta";
  std::optional<double> theta;
  if (text.has(key)) theta = text.number(key, 0);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!text.has(name)) continue;
    if (!text.is_object(name) || !is_plain_rope(text.object(name))) {
      text.refuse(
          format("{} {} is not supported: only the default rotary embedding is", text.full_name(name), text.json(name)),
          "use a model without rotary scaling");
    }
    const JsonObject rope = text.object(name);
    if (!rope.has(key)) continue;
    const double nested = rope.number(key, 0);
    if (theta && *theta != nested) {
      text.refuse(format("{} is {} and {} is {}", text.full_name(key), *theta, rope.full_name(key), nested),
                  "keep the right one");
    }
    theta = nested;
  }
  if (!theta) {
    text.refuse("missing " + text.full_name(key), "add it: it differs between releases, so there is no safe default");
  }
  return *theta;
}

void refuse_unsupported(const JsonObject& text) {
  const auto name = [&](const char* field) { return text.full_name(field); };
  const std::string activation = text.text("hidden_act", "silu");
  if (activation != "silu") {
    text.refuse(format("{} must be silu, not {}", name("hidden_act"), shown(activation)), "use a Qwen3 model");
  }
  if (text.boolean("attention_bias", false)) {
    text.refuse(name("attention_bias") + " true is not supported",
                "use a model without attention biases, as Qwen3 releases are");
  }
  if (text.number("attention_dropout", 0) != 0) {
    text.refuse(name("attention_dropout") + " is not supported",
                "set attention_dropout to 0, as in the Qwen3 releases");
  }
  const std::string window_hint = "use a model with full attention in every layer, as Qwen3 releases are";
  if (text.boolean("use_sliding_window", false)) {
    text.refuse(name("use_sliding_window") + " true is not supported", window_hint);
  }
  for (const std::string& type : text.texts("layer_types")) {
    if (type == "full_attention") continue;
    text.refuse(format("{} \"{}\" is not supported", name("layer_types"), shown(type)), window_hint);
  }
}

}  // namespace

ModelConfig read_hf_qwen3(const JsonObject& text) {
  refuse_unsupported(text);
  ModelConfig model;
  read_hf_common(text, model);
  // The remaining defaults are those of the transformers class Qwen3Config, which differ from the released models.
  model.head_dim = text.integer("head_dim", 128);
  model.max_position_embeddings = text.integer("max_position_embeddings", 32768);
  model.tie_word_embeddings = text.boolean("tie_word_embeddings", false);
  model.rope_theta = read_rope_theta(text);
  return model;
}

std::string to_hf_qwen3(const ModelConfig& model, const std::string& dtype) {
  const Json json = {
      {"architectures", Json::array({"Qwen3ForCausalLM"})},
      {"model_type", "qwen3"},
      {"vocab_size", model.vocab_size},
      {"hidden_size", model.hidden_size},
      {"intermediate_size", model.intermediate_size},
      {"num_hidden_layers", model.num_hidden_layers},
      {"num_attention_heads", model.num_attention_heads},
      {"num_key_value_heads", model.num_key_value_heads},
      {"head_dim", model.head_dim},
      {"max_position_embeddings", model.max_position_embeddings},
      {"rms_norm_eps", model.rms_norm_eps},
      {"initializer_range", model.initializer_range},
      {"tie_word_embeddings", model.tie_word_embeddings},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"use_sliding_window", false},
      {"sliding_window", nullptr},
      {"max_window_layers", model.num_hidden_layers},
      {"use_cache", true},
      // Both spellings: transformers 4 reads rope_theta and torch_dtype, 5 reads rope_parameters and dtype.
      {"rope_theta", model.rope_theta},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", model.rope_theta}}},
      {"torch_dtype", dtype},
      {"dtype", dtype},
  };
  return json.dump(2) + "\n";
}

}  // namespace invar
