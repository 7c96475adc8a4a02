#pragma once

#include <string>

namespace invar {

// Files of a multimodal model name the text model's tensors model.language_model. instead of model., and carry the
// towers and embedders of vision and audio, which are no part of it.

// The text model's name of a tensor.
std::string text_model_name(const std::string& name);
// What a multimodal file calls the text model's tensor.
std::string multimodal_name(const std::string& name);
bool is_other_modality(const std::string& name);

}  // namespace invar
