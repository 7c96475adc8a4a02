#pragma once

#include <string>
#include <vector>

namespace invar {

// A part of a model of several modalities that is not its text model, and that invar leaves out.
struct HfTower {
  std::string modality;               // "vision"
  std::vector<std::string> prefixes;  // of its tensors' names
};

// The towers that FOLDER/config.json declares; none for a text model. Throws as read_hf_config() does.
std::vector<HfTower> read_hf_towers(const std::string& folder);

}  // namespace invar
