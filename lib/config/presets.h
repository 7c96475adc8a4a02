#pragma once

#include <string_view>
#include <vector>

#include "config/config.h"

namespace invar {

// Names of the presets: every dense size of Qwen3 and Gemma 4.
std::vector<std::string_view> preset_names();

// The named model, family included. An unknown name, and a model that is known but not supported yet, throw
// Error{kConfig}.
ModelConfig preset_model(std::string_view name);

}  // namespace invar
