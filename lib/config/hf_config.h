#pragma once

#include <string>

#include "config/config.h"

namespace invar {

// Reads FOLDER/config.json of a Hugging Face model into the model fields, family included; hf_path is set to the
// folder. Its model_type is qwen3 or gemma4_text, or one of several modalities that holds such a text model. Whatever
// would change the computation and is not supported throws Error{kConfig} naming file and field: another model_type,
// mixture of experts, rotary scaling, biases, another activation. Unknown fields are ignored: these files carry many
// that have no effect on the mathematics.
ModelConfig read_hf_config(const std::string& folder);

// The text of a config.json that transformers reads as this model: 4.51 and later and 5.x for qwen3, the versions that
// have Gemma 4 for gemma4.
std::string to_hf_config(const ModelConfig& model, Precision precision);

}  // namespace invar
