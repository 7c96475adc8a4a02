#pragma once

#include <span>
#include <string>

#include "config/config.h"

namespace invar {

// Reads a YAML config, strictly: an unknown key, a key given twice, a value of the wrong type and YAML that is not
// well formed throw Error{kConfig} with file and line (or the argument), the key, the rule and the fix.
//
// overrides: "section.key=value", the value a YAML scalar. What comes later wins:
// defaults, then model.preset or the config.json of model.hf_path, then the file, then the overrides.
// Only the form is judged here; validate() judges the values together.
Config load_config(const std::string& path, std::span<const std::string> overrides = {});

// The same from text; `name` stands for the file in messages.
Config load_config_text(const std::string& text, const std::string& name, std::span<const std::string> overrides = {});

// The overrides alone, onto a config made in code.
void apply_overrides(Config& config, std::span<const std::string> overrides);

}  // namespace invar
