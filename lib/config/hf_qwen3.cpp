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
double read_rope_theta(const JsonObject& file) {
  std::optional<double> theta;
  if (file.has("rope_theta")) theta = file.number("rope_theta", 0);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!file.has(name)) continue;
    if (!file.is_object(name) || !is_plain_rope(file.object(name))) {
      file.refuse(format("{} {} is not supported: only the default rotary embedding is", name, file.json(name)),
                  "use a model without rotary scaling");
    }
    const JsonObject rope = file.object(name);
    if (!rope.has("rope_theta")) continue;
    const double nested = rope.number("rope_theta", 0);
    if (theta && *theta != nested) {
      file.refuse(format("rope_theta is {} and {}.rope_theta is {}", *theta, name, nested), "keep the right one");
    }
    theta = nested;
  }
  if (!theta) file.refuse("missing rope_theta", "add it: it differs between releases, so there is no safe default");
  return *theta;
}

void refuse_unsupported(const JsonObject& file) {
  const std::string activation = file.text("hidden_act", "silu");
  if (activation != "silu")
    file.refuse(format("hidden_act must be silu, not {}", shown(activation)), "use a Qwen3 model");
  if (file.boolean("attention_bias", false)) {
    file.refuse("attention_bias true is not supported", "use a model without attention biases, as Qwen3 releases are");
  }
  if (file.number("attention_dropout", 0) != 0) {
    file.refuse("attention_dropout is not supported", "set attention_dropout to 0, as in the Qwen3 releases");
  }
  const std::string window_hint = "use a model with full attention in every layer, as Qwen3 releases are";
  if (file.boolean("use_sliding_window", false)) file.refuse("use_sliding_window true is not supported", window_hint);
  for (const std::string& type : file.texts("layer_types")) {
    if (type != "full_attention") file.refuse(format("layer_types \"{}\" is not supported", shown(type)), window_hint);
  }
}

}  // namespace

ModelConfig read_hf_qwen3(const JsonObject& file) {
  refuse_unsupported(file);
  ModelConfig model;
  read_hf_common(file, model);
  // The remaining defaults are those of the transformers class Qwen3Config, which differ from the released models.
  model.head_dim = file.integer("head_dim", 128);
  model.max_position_embeddings = file.integer("max_position_embeddings", 32768);
  model.tie_word_embeddings = file.boolean("tie_word_embeddings", false);
  model.rope_theta = read_rope_theta(file);
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
