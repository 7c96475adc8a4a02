#pragma once

#include <string>

#include "config/config.h"

namespace invar {

// Reads FOLDER/config.json of a Hugging Face model into the model fields; hf_path is set to the folder.
// Whatever would change the computation and is not supported (another model_type, rotary scaling, biases, sliding
// windows, another activation) throws Error{kConfig} naming file and field. Unknown fields are ignored: these files
// carry many that have no effect on the mathematics.
ModelConfig read_hf_config(const std::string& folder);

// The text of a config.json that transformers 4.51 and later, and 5.x, read as this model.
std::string to_hf_config(const ModelConfig& model, Precision precision);

}  // namespace invar
