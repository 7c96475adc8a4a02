#pragma once

#include <span>
#include <string>
#include <string_view>

#include "config/config.h"
#include "core/json_object.h"

namespace invar {

// One tower of a class, and the field of its config.json that declares it: absent or null where a release has none.
struct HfTowerRow {
  std::string_view field;
  std::string_view modality;
  std::string_view prefixes[2];  // of the tensors in the files; empty beyond those it has
};

// A class of transformers that holds a text model, as text_config, beside towers of other modalities. For text alone
// it computes what its text model computes.
struct HfWrapper {
  std::string_view model_type;
  std::string_view text_type;  // the model_type of its text_config
  bool tied;                   // tie_word_embeddings where the file does not give it
  HfTowerRow towers[2];
};

std::span<const HfWrapper> hf_wrappers();
const HfWrapper* find_hf_wrapper(std::string_view model_type);  // null if none has it

JsonObject open_hf_config(const std::string& folder);

// The fields that are the same in all families; the sizes among them are required.
void read_hf_common(const JsonObject& text, ModelConfig& model);

// The text model of one family each, and the file of it alone. hf_path is left empty.

ModelConfig read_hf_qwen3(const JsonObject& text);
std::string to_hf_qwen3(const ModelConfig& model, const std::string& dtype);

// The "unified" text model is the same without per-layer inputs, and its class has other defaults.
ModelConfig read_hf_gemma4(const JsonObject& text, bool unified);
std::string to_hf_gemma4(const ModelConfig& model, const std::string& dtype);

}  // namespace invar
