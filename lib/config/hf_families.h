#pragma once

#include <string>

#include "config/config.h"
#include "core/json_object.h"

namespace invar {

// The fields that are the same in all families; the sizes among them are required.
void read_hf_common(const JsonObject& file, ModelConfig& model);

// The config.json of one family each: reading, and writing it back. hf_path is left empty.

ModelConfig read_hf_qwen3(const JsonObject& file);
std::string to_hf_qwen3(const ModelConfig& model, const std::string& dtype);

// A file of the text model (model_type gemma4_text), or of a multimodal one that holds it as text_config; of the
// latter only the text model is read.
ModelConfig read_hf_gemma4(const JsonObject& file);
std::string to_hf_gemma4(const ModelConfig& model, const std::string& dtype);

}  // namespace invar
