#include "config/hf_config.h"

#include <filesystem>

#include "config/hf_families.h"
#include "core/shown.h"

namespace invar {

void read_hf_common(const JsonObject& file, ModelConfig& model) {
  file.require({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads"});
  model.vocab_size = file.integer("vocab_size");
  model.hidden_size = file.integer("hidden_size");
  model.intermediate_size = file.integer("intermediate_size");
  model.num_hidden_layers = file.integer("num_hidden_layers");
  model.num_attention_heads = file.integer("num_attention_heads");
  model.num_key_value_heads = file.integer("num_key_value_heads");
  // Defaults of the transformers classes.
  model.rms_norm_eps = file.number("rms_norm_eps", 1e-6);
  model.initializer_range = file.number("initializer_range", 0.02);
}

ModelConfig read_hf_config(const std::string& folder) {
  const JsonRules rules{ErrorKind::kConfig,
                        "name the folder of a Hugging Face model, and download its config.json again if it is damaged",
                        "add the fields with the values of the model"};
  const JsonObject file = JsonObject::open((std::filesystem::path(folder) / "config.json").string(), rules);
  const std::string model_type = file.text("model_type", "");
  const std::string hint = "use a dense Qwen3 or Gemma 4 model (model_type qwen3, gemma4_text or gemma4)";
  if (model_type.empty()) file.refuse("missing model_type", hint);
  if (file.has("quantization_config")) {
    file.refuse("quantization_config: quantised weights cannot be trained", "use the bf16 release of the model");
  }
  const bool is_gemma4 = model_type == "gemma4_text" || model_type == "gemma4" || model_type == "gemma4_unified_text" ||
                         model_type == "gemma4_unified";
  if (!is_gemma4 && model_type != "qwen3") {
    file.refuse(format("model_type {} is not supported yet", shown(model_type)), hint);
  }
  ModelConfig model = is_gemma4 ? read_hf_gemma4(file) : read_hf_qwen3(file);
  model.hf_path = folder;
  return model;
}

std::string to_hf_config(const ModelConfig& model, Precision precision) {
  const char* dtype = precision == Precision::kBF16 ? "bfloat16" : "float32";
  return model.family == "gemma4" ? to_hf_gemma4(model, dtype) : to_hf_qwen3(model, dtype);
}

}  // namespace invar
