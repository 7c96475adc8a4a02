#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "config/field.h"

namespace invar {

// What a key means when it is not given.
enum class Default : uint8_t {
  kValue,     // the member's initial value
  kAuto,      // the initial value, which is written `auto` and cannot be written as a number
  kRequired,  // nothing: the initial value stands for "not given"
};

// One YAML key. The table is the only list of the keys: reading, printing, suggestions and documentation come from it.
struct Key {
  std::string_view section;  // "train"; "parallel.nonuniform" within another; empty: a value at the top level
  std::string_view name;
  Field (*field)(Config&);
  std::string_view help;
  Default when_absent = Default::kValue;

  std::string full_name() const;  // "train.steps", "device"
};

// All keys, those of a section together.
std::span<const Key> key_table();

// Section names in the order of the table, without the top level. A section follows the one that it stands in.
std::vector<std::string_view> section_names();

// The names of a section's keys; of the top-level scalars if the section is empty.
std::vector<std::string_view> key_names(std::string_view section);

// Null if there is no such key.
const Key* find_key(std::string_view section, std::string_view name);
const Key* find_key(std::string_view full_name);

// Sets and prints one key of a config; `auto` is handled here.
std::optional<Refusal> assign(const Key& key, Config& config, const Value& value);
std::string print(const Key& key, const Config& config);
bool has_default(const Key& key, const Config& config);

// Every key with type, default and meaning: one Markdown table per section.
std::string describe_keys();

// The whole config as YAML, every key with its value. load_config() reads it back to an equal config.
std::string to_yaml(const Config& config);

// The same, but readable without the preset or the Hugging Face folder that the model came from.
std::string to_portable_yaml(const Config& config);

}  // namespace invar
