#include "config/hf_config.h"

#include <filesystem>

#include "config/hf_families.h"
#include "core/shown.h"

namespace invar {

void read_hf_common(const JsonObject& text, ModelConfig& model) {
  text.require({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads"});
  model.vocab_size = text.integer("vocab_size");
  model.hidden_size = text.integer("hidden_size");
  model.intermediate_size = text.integer("intermediate_size");
  model.num_hidden_layers = text.integer("num_hidden_layers");
  model.num_attention_heads = text.integer("num_attention_heads");
  model.num_key_value_heads = text.integer("num_key_value_heads");
  // Defaults of the transformers classes.
  model.rms_norm_eps = text.number("rms_norm_eps", 1e-6);
  model.initializer_range = text.number("initializer_range", 0.02);
}

JsonObject open_hf_config(const std::string& folder) {
  const JsonRules rules{
      .kind = ErrorKind::kConfig,
      .fix = "name the folder of a Hugging Face model, and download its config.json again if it is damaged",
      .missing = "add the fields with the values of the model"};
  return JsonObject::open((std::filesystem::path(folder) / "config.json").string(), rules);
}

namespace {

// Quantised weights cannot be trained.
void refuse_quantised(const JsonObject& config) {
  if (!config.has("quantization_config")) return;
  config.refuse(config.full_name("quantization_config") + ": quantised weights cannot be trained",
                "use the bf16 release of the model");
}

bool is_text_type(const std::string& model_type) {
  return model_type == "qwen3" || model_type == "gemma4_text" || model_type == "gemma4_unified_text";
}

ModelConfig read_text_model(const JsonObject& text, std::string_view text_type) {
  if (text_type.starts_with("qwen3")) return read_hf_qwen3(text);
  return read_hf_gemma4(text, text_type == "gemma4_unified_text");
}

// As transformers has it, the outer tie_word_embeddings holds; where it is absent, the inner one must agree.
bool is_tied(const JsonObject& file, const JsonObject& text, bool absent) {
  const char* name = "tie_word_embeddings";
  if (!file.has(name) && text.boolean(name, absent) != absent) {
    file.refuse("tie_word_embeddings and text_config.tie_word_embeddings differ", "keep the right one");
  }
  return file.boolean(name, absent);
}

ModelConfig read_wrapped_model(const JsonObject& file, const HfWrapper& wrapper) {
  file.require({"text_config"});
  const JsonObject text = file.object("text_config");
  const std::string nested = text.text("model_type", std::string(wrapper.text_type));
  if (nested != wrapper.text_type) {
    file.refuse(format("text_config.model_type must be {}, not {}", wrapper.text_type, shown(nested)),
                format("use a {} release", wrapper.text_type.starts_with("qwen3") ? "Qwen3" : "Gemma 4"));
  }
  refuse_quantised(text);
  ModelConfig model = read_text_model(text, wrapper.text_type);
  model.tie_word_embeddings = is_tied(file, text, wrapper.tied);
  return model;
}

}  // namespace

ModelConfig read_hf_config(const std::string& folder) {
  const JsonObject file = open_hf_config(folder);
  const std::string model_type = file.text("model_type", "");
  std::string hint = "use a dense Qwen3 or Gemma 4 model: model_type qwen3, gemma4_text, gemma4_unified_text";
  for (const HfWrapper& known : hf_wrappers()) hint += format(", {}", known.model_type);
  if (model_type.empty()) file.refuse("missing model_type", hint);
  refuse_quantised(file);
  const HfWrapper* wrapper = find_hf_wrapper(model_type);
  if (wrapper == nullptr && !is_text_type(model_type)) {
    file.refuse(format("model_type {} is not supported yet", shown(model_type)), hint);
  }
  ModelConfig model = wrapper ? read_wrapped_model(file, *wrapper) : read_text_model(file, model_type);
  model.hf_path = folder;
  return model;
}

std::string to_hf_config(const ModelConfig& model, Precision precision) {
  const char* dtype = precision == Precision::kBF16 ? "bfloat16" : "float32";
  return model.family == "gemma4" ? to_hf_gemma4(model, dtype) : to_hf_qwen3(model, dtype);
}

}  // namespace invar
