#include "config/hf_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"

namespace invar {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDownloadAgain = "download the model's config.json again";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(ErrorKind::kConfig, format("{}: cannot open the model's config", path),
                "model.hf_path must be a folder that holds a Hugging Face config.json");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Json parse_object(const std::string& path) {
  const std::string text = read_text(path);
  try {
    Json json = Json::parse(text);
    if (json.is_object()) return json;
  } catch (const Json::parse_error& error) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, text.size()));
    throw Error(ErrorKind::kConfig, format("{}:{}: not valid JSON", path, 1 + std::count(text.begin(), end, '\n')),
                kDownloadAgain);
  }
  throw Error(ErrorKind::kConfig, format("{}: not a JSON object", path), kDownloadAgain);
}

// Typed access to the fields of one config.json; null counts as absent, as it does for transformers.
class HfFile {
 public:
  explicit HfFile(std::string path) : path_(std::move(path)), json_(parse_object(path_)) {}

  [[noreturn]] void refuse(const std::string& what, const std::string& hint) const {
    throw Error(ErrorKind::kConfig, format("{}: {}", path_, what), hint);
  }

  bool has(const char* name) const { return json_.contains(name) && !json_[name].is_null(); }
  const Json& operator[](const char* name) const { return json_.at(name); }

  void require(std::initializer_list<const char*> names) const {
    std::string missing;
    for (const char* name : names) {
      if (!has(name)) missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
    if (!missing.empty()) refuse(format("missing {}", missing), "add the fields with the values of the model");
  }

  int64_t integer(const char* name, int64_t absent = 0) const {
    if (!has(name)) return absent;
    if (!json_[name].is_number_integer()) refuse_type(name, "an integer");
    return json_[name].get<int64_t>();
  }
  double number(const char* name, double absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_number()) refuse_type(name, "a number");
    return json_[name].get<double>();
  }
  bool boolean(const char* name, bool absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_boolean()) refuse_type(name, "true or false");
    return json_[name].get<bool>();
  }
  std::string text(const char* name, const std::string& absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_string()) refuse_type(name, "a string");
    return json_[name].get<std::string>();
  }

 private:
  [[noreturn]] void refuse_type(const char* name, const char* type) const {
    refuse(format("{} must be {}, not {}", name, type, json_[name].dump()), kDownloadAgain);
  }

  std::string path_;
  Json json_;
};

// The rotary settings of one dictionary; true for the plain rotation, written {"rope_type": "default"} or not at all.
bool is_plain_rope(const Json& rope) {
  for (const char* name : {"rope_type", "type"}) {
    if (rope.contains(name) && rope[name] != "default") return false;
  }
  return !rope.contains("partial_rotary_factor") || rope["partial_rotary_factor"] == 1.0;
}

// transformers 4 writes rope_theta at the top level and rope_scaling beside it, 5 writes both into rope_parameters.
double read_rope_theta(const HfFile& file) {
  std::optional<double> theta;
  if (file.has("rope_theta")) theta = file.number("rope_theta", 0);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!file.has(name)) continue;
    const Json& rope = file[name];
    if (!rope.is_object() || !is_plain_rope(rope)) {
      file.refuse(format("{} {} is not supported: only the default rotary embedding is", name, rope.dump()),
                  "use a model without rotary scaling");
    }
    if (!rope.contains("rope_theta") || rope["rope_theta"].is_null()) continue;
    if (!rope["rope_theta"].is_number()) file.refuse(format("{}.rope_theta must be a number", name), kDownloadAgain);
    const double nested = rope["rope_theta"].get<double>();
    if (theta && *theta != nested) {
      file.refuse(format("rope_theta is {} and {}.rope_theta is {}", *theta, name, nested), "keep the right one");
    }
    theta = nested;
  }
  if (!theta) file.refuse("missing rope_theta", "add it: it differs between releases, so there is no safe default");
  return *theta;
}

void refuse_unsupported(const HfFile& file) {
  const std::string model_type = file.text("model_type", "");
  if (model_type != "qwen3") {
    file.refuse(model_type.empty() ? "missing model_type" : format("model_type {} is not supported yet", model_type),
                "use a dense Qwen3 model (model_type qwen3)");
  }
  const std::string activation = file.text("hidden_act", "silu");
  if (activation != "silu") file.refuse(format("hidden_act must be silu, not {}", activation), "use a Qwen3 model");
  if (file.boolean("attention_bias", false)) {
    file.refuse("attention_bias true is not supported", "use a model without attention biases, as Qwen3 releases are");
  }
  if (file.number("attention_dropout", 0) != 0) {
    file.refuse("attention_dropout is not supported", "set attention_dropout to 0, as in the Qwen3 releases");
  }
  const std::string window_hint = "use a model with full attention in every layer, as Qwen3 releases are";
  if (file.boolean("use_sliding_window", false)) file.refuse("use_sliding_window true is not supported", window_hint);
  if (file.has("layer_types")) {
    for (const Json& type : file["layer_types"]) {
      if (type != "full_attention") file.refuse(format("layer_types {} is not supported", type.dump()), window_hint);
    }
  }
  if (file.has("quantization_config")) {
    file.refuse("quantization_config: quantised weights cannot be trained", "use the bf16 release of the model");
  }
}

}  // namespace

ModelConfig read_hf_config(const std::string& folder) {
  const HfFile file((std::filesystem::path(folder) / "config.json").string());
  refuse_unsupported(file);
  file.require({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads"});
  ModelConfig model;
  model.hf_path = folder;
  model.vocab_size = file.integer("vocab_size");
  model.hidden_size = file.integer("hidden_size");
  model.intermediate_size = file.integer("intermediate_size");
  model.num_hidden_layers = file.integer("num_hidden_layers");
  model.num_attention_heads = file.integer("num_attention_heads");
  model.num_key_value_heads = file.integer("num_key_value_heads");
  // The remaining defaults are those of the transformers class Qwen3Config, which differ from the released models.
  model.head_dim = file.integer("head_dim", 128);
  model.max_position_embeddings = file.integer("max_position_embeddings", 32768);
  model.rms_norm_eps = file.number("rms_norm_eps", 1e-6);
  model.initializer_range = file.number("initializer_range", 0.02);
  model.tie_word_embeddings = file.boolean("tie_word_embeddings", false);
  model.rope_theta = read_rope_theta(file);
  return model;
}

std::string to_hf_config(const ModelConfig& model, Precision precision) {
  const char* dtype = precision == Precision::kBF16 ? "bfloat16" : "float32";
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
