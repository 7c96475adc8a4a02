#include "config/yaml_loader.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>

#include "config/hf_config.h"
#include "config/key_table.h"
#include "config/presets.h"
#include "config/suggest.h"
#include "config/yaml_document.h"
#include "core/error.h"
#include "core/input_file.h"
#include "core/shown.h"

namespace invar {
namespace {

// One key with its value, from the file or from the command line.
struct Assignment {
  const Key* key;
  Value value;
  std::string origin;
};

[[noreturn]] void refuse(const std::string& origin, const std::string& what, const std::string& fix) {
  constexpr size_t kLongest = 2000;  // names and values in it may be of any length
  throw Error(ErrorKind::kConfig, shown(format("{}: {}", origin, what), kLongest), shown(fix, kLongest));
}

[[noreturn]] void refuse_section(const std::string& origin, const std::string& name) {
  for (const Key& key : key_table()) {
    if (key.name == name) {
      refuse(origin, format("{} is not a section", name),
             format("{0} is a key of section {1}: write it as {1}.{0}, in the file indented below {1}:", name,
                    key.section));
    }
  }
  std::vector<std::string_view> known = section_names();
  for (std::string_view key : key_names("")) known.push_back(key);
  const std::string_view nearest = nearest_word(name, known);
  refuse(
      origin, format("unknown section {}", shown(name)),
      nearest.empty() ? format("the sections are {}", join_words(known, ", ")) : format("did you mean {}?", nearest));
}

[[noreturn]] void refuse_key(const std::string& origin, const std::string& section, const std::string& name) {
  const std::string what = format("unknown key {}.{}", section, shown(name));
  const std::vector<std::string_view> known = key_names(section);
  if (known.empty()) refuse(origin, what, format("{} is a single value: write {}: value", section, section));
  for (const Key& key : key_table()) {
    if (key.name == name) refuse(origin, what, format("did you mean {}?", key.full_name()));
  }
  const std::string_view nearest = nearest_word(name, known);
  refuse(origin, what,
         nearest.empty() ? format("the keys of {} are {}", section, join_words(known, ", "))
                         : format("did you mean {}.{}?", section, nearest));
}

// Top-level scalar, or section.key; refuses names that do not exist.
const Key& known_key(const std::string& origin, const std::string& section, const std::string& name) {
  const Key* key = find_key(section, name);
  if (key != nullptr) return *key;
  const bool is_section = !key_names(section).empty() && !section.empty();
  if (is_section || find_key("", section) != nullptr) refuse_key(origin, section, name);
  refuse_section(origin, section.empty() ? name : section);
}

// "[969, 30, 1]" where a text is expected: the text that was meant.
std::string joined_list(const YamlNode& list) {
  std::string text;
  for (const YamlNode& item : list.items) {
    if (!item.is_scalar()) return "text";
    text += (text.empty() ? "" : ", ") + item.text;
  }
  return format("\"{}\"", shown(text));
}

// The parser tags plain scalars "?" and quoted ones "!".
bool has_own_tag(const YamlNode& scalar) {
  return scalar.tag != "?" && scalar.tag != "!";
}

Value read_scalar(const YamlNode& node) {
  return {node.text, node.tag == "!"};
}

// A list whose items are all scalars; nothing for any other value.
std::optional<Value> read_list(const YamlNode& node) {
  if (!node.is_list()) return std::nullopt;
  Value value;
  for (const YamlNode& item : node.items) {
    if (!item.is_scalar() || has_own_tag(item)) return std::nullopt;
    value.items.push_back(read_scalar(item));
  }
  return value;
}

// A map of such lists; nothing for any other value.
std::optional<Value> read_map_of_lists(const YamlNode& node) {
  if (!node.is_map()) return std::nullopt;
  Value value;
  for (size_t i = 0; i < node.items.size(); i += 2) {
    std::optional<Value> list = read_list(node.items[i + 1]);
    if (!node.items[i].is_scalar() || !list) return std::nullopt;
    list->text = node.items[i].text;
    value.items.push_back(std::move(*list));
  }
  return value;
}

// A list whose items are scalars or lists of scalars; nothing for any other value.
std::optional<Value> read_sources(const YamlNode& node) {
  if (!node.is_list()) return std::nullopt;
  Value value;
  for (const YamlNode& item : node.items) {
    const std::optional<Value> inner = read_list(item);
    if (inner ? inner->items.empty() : !item.is_scalar() || has_own_tag(item)) return std::nullopt;
    value.items.push_back(inner ? *inner : read_scalar(item));
  }
  return value;
}

// A list of values, or a map of such lists.
Value read_composite(const std::string& origin, const Key& key, Shape shape, const YamlNode& node) {
  if (std::optional<Value> value = shape == Shape::kList ? read_list(node) : read_map_of_lists(node)) return *value;
  Config scratch;
  const char* example = shape == Shape::kList ? "[first, second], or [] for none" : "{0: [2, 5]}, or {} for none";
  refuse(origin, format("{} must be a {}", key.full_name(), type_name(key.field(scratch))),
         format("write {}: {}", key.name, example));
}

Value read_value(const std::string& origin, const Key& key, const YamlNode& node) {
  const std::string name = key.full_name();
  Config scratch;
  const Field field = key.field(scratch);
  const Shape shape = shape_of(field);
  if (shape == Shape::kList || shape == Shape::kMapOfLists) return read_composite(origin, key, shape, node);
  if (shape == Shape::kSources && node.is_list()) {
    if (const std::optional<Value> sources = read_sources(node)) return *sources;
    refuse(origin, format("{} must be a text, or a list of paths or of pairs of weight and path", name),
           format("write {}: [[0.7, data/a], [0.3, data/b]]", key.name));
  }
  const bool is_text = shape == Shape::kSources || std::holds_alternative<std::string*>(field);
  const std::string example = is_text ? "text" : type_name(field);
  if (node.is_list()) {
    refuse(origin, format("{} needs a single value, not a list", name),
           format("write {}: {}", key.name, is_text ? joined_list(node) : example));
  }
  if (node.is_map()) {
    refuse(origin, format("{} needs a single value, not keys of its own", name),
           format("write {}: {}", key.name, example));
  }
  if (!node.is_scalar()) {
    refuse(origin, format("{} has no value", name),
           is_text ? format("write {}: \"\" for an empty text, or remove the key", key.name)
                   : format("write {}: {}, or remove the key", key.name, example));
  }
  if (has_own_tag(node)) {
    refuse(origin, format("{} carries the YAML tag {}", name, shown(node.tag)),
           format("write {}: {}", key.name, example));
  }
  return read_scalar(node);
}

std::string read_text(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) refuse(path, "is a folder", "name the YAML file in it");
  std::string all =
      read_text_file(path, kLargestYaml, "check the path; ready-to-run configs are in configs/", ErrorKind::kConfig);
  // The parser lets a quote that is never closed swallow the rest of a file, unless the text ends inside the last line.
  all.erase(all.find_last_not_of(" \t\r\n") + 1);
  return all;
}

// YAML forbids tabs in indentation; the parser's own message for them is obscure.
void refuse_tabs(const std::string& path, const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    if (line.find('\t') < first) {
      refuse(format("{}:{}", path, number), "tab in the indentation", "indent with spaces: YAML does not allow tabs");
    }
  }
}

YamlNode parse_document(const std::string& path, const std::string& text) {
  refuse_tabs(path, text);
  YamlNode document;
  try {
    document = parse_yaml(text);
  } catch (const YamlFault& fault) {
    constexpr const char* kLook =
        "check this line and the one before: indentation, a missing \": \" or quote, an unclosed bracket";
    refuse(fault.line > 0 ? format("{}:{}", path, fault.line) : path, fault.rule,
           fault.fix.empty() ? kLook : fault.fix);
  }
  if (document.is_null()) {
    refuse(path, "the config file is empty", "start from a file of configs/, such as configs/quickstart.yaml");
  }
  if (!document.is_map()) {
    refuse(path, "the file is not a map of sections", format("the sections are {}", join_words(section_names(), ", ")));
  }
  return document;
}

class FileReader {
 public:
  FileReader(std::string path, const std::string& text)
      : path_(std::move(path)), document_(parse_document(path_, text)) {}

  std::vector<Assignment> read() {
    for_each_entry(document_, [&](const YamlNode& name, const YamlNode& value) { read_top_level(name, value); });
    return std::move(assignments_);
  }

 private:
  std::string origin(const YamlNode& name) const { return format("{}:{}", path_, name.line); }

  // Calls visit(name, value).
  template <class Visit>
  static void for_each_entry(const YamlNode& map, Visit visit) {
    for (size_t i = 0; i < map.items.size(); i += 2) visit(map.items[i], map.items[i + 1]);
  }

  // The name as text; the parser keeps a name that stands twice, so each is remembered with its line.
  std::string unique_name(const std::string& section, const YamlNode& node) {
    if (!node.is_scalar()) refuse(origin(node), "the name of a key must be a word", "write key: value");
    const std::string name = section.empty() ? node.text : format("{}.{}", section, node.text);
    const auto [first, is_new] = lines_.emplace(name, node.line);
    if (!is_new) {
      refuse(origin(node), format("{} is given twice, first at line {}", shown(name), first->second),
             "keep one of the two");
    }
    return node.text;
  }

  void read_top_level(const YamlNode& name_node, const YamlNode& node) {
    const std::string name = unique_name("", name_node);
    if (find_key("", name) != nullptr) return add(known_key(origin(name_node), "", name), name_node, node);
    if (key_names(name).empty()) refuse_section(origin(name_node), name);
    read_section(name, name_node, node);
  }

  void read_section(const std::string& name, const YamlNode& name_node, const YamlNode& node) {
    if (!node.is_map()) {
      refuse(origin(name_node), format("section {} has no keys", name),
             format("indent its keys below it ({}), or remove it", join_words(key_names(name), ", ")));
    }
    for_each_entry(node, [&](const YamlNode& key_node, const YamlNode& value) {
      const std::string key = unique_name(name, key_node);
      const std::string inner = format("{}.{}", name, key);
      if (!key_names(inner).empty()) return read_section(inner, key_node, value);
      add(known_key(origin(key_node), name, key), key_node, value);
    });
  }

  void add(const Key& key, const YamlNode& name_node, const YamlNode& value) {
    assignments_.push_back({&key, read_value(origin(name_node), key, value), origin(name_node)});
  }

  std::string path_;
  YamlNode document_;
  std::map<std::string, int> lines_;
  std::vector<Assignment> assignments_;
};

std::string origin_of(const std::string& argument) {
  constexpr size_t kLongest = 200;
  return format("argument {}", shown(argument, kLongest));
}

Assignment read_override(const std::string& argument) {
  const std::string origin = origin_of(argument);
  const size_t equals = argument.find('=');
  const size_t dot = argument.substr(0, equals).rfind('.');
  if (equals == std::string::npos || equals == 0 || dot == 0 || dot + 1 == equals) {
    refuse(origin, "not of the form section.key=value", "write for example train.steps=100");
  }
  const std::string name = argument.substr(0, equals);
  const bool is_top_level = dot == std::string::npos;
  const std::string section = is_top_level ? "" : name.substr(0, dot);
  const std::string key_name = is_top_level ? name : name.substr(dot + 1);
  if (!name.empty() && !key_names(name).empty()) {
    refuse(origin, format("{} is a section", name), format("name a key of it: {}", join_words(key_names(name), ", ")));
  }
  const Key& key = known_key(origin, section, key_name);
  try {
    return {&key, read_value(origin, key, parse_yaml(argument.substr(equals + 1))), origin};
  } catch (const YamlFault& fault) {
    refuse(origin, format("{}: {}", name, fault.rule),
           fault.fix.empty() ? format("quote it: {}='\"value\"'", name) : fault.fix);
  }
}

void apply_all(const std::vector<Assignment>& assignments, Config& config) {
  for (const Assignment& assignment : assignments) {
    const std::string name = assignment.key->full_name();
    if (const std::optional<Refusal> refusal = assign(*assignment.key, config, assignment.value)) {
      refuse(assignment.origin, format("{} {}", name, refusal->rule), refusal->fix);
    }
    config.origin[name] = assignment.origin;
  }
}

// The model that preset or hf_path names, under the fields given beside it.
ModelConfig base_model(const Config& given) {
  const ModelConfig& model = given.model;
  if (model.preset.empty() && model.hf_path.empty()) return {};
  const std::string key = model.preset.empty() ? "model.hf_path" : "model.preset";
  const std::string& origin = given.origin.at(key);
  if (!model.preset.empty() && !model.hf_path.empty()) {
    refuse(origin,
           format("model.preset {} and model.hf_path {} are both given", shown(model.preset), shown(model.hf_path)),
           "keep one: each of them sets the whole model");
  }
  ModelConfig base;
  try {
    base = model.preset.empty() ? read_hf_config(model.hf_path) : preset_model(model.preset);
  } catch (const Error& error) {
    refuse(origin, error.what(), error.hint());
  }
  const auto family = given.origin.find("model.family");
  if (family != given.origin.end() && model.family != base.family) {
    refuse(family->second,
           format("model.family {} contradicts {} {}, which is {}", shown(model.family), key,
                  model.preset.empty() ? model.hf_path : model.preset, base.family),
           format("remove model.family: {} sets it", key));
  }
  return base;
}

std::vector<Assignment> read_overrides(std::span<const std::string> overrides) {
  std::vector<Assignment> assignments;
  std::map<std::string, std::string> arguments;
  for (const std::string& argument : overrides) {
    Assignment assignment = read_override(argument);
    const auto [first, is_new] = arguments.emplace(assignment.key->full_name(), argument);
    if (!is_new) {
      refuse(origin_of(argument), format("{} is given twice, first by {}", first->first, shown(first->second)),
             "keep one of the two");
    }
    assignments.push_back(std::move(assignment));
  }
  return assignments;
}

}  // namespace

Config load_config(const std::string& path, std::span<const std::string> overrides) {
  return load_config_text(read_text(path), path, overrides);
}

Config load_config_text(const std::string& text, const std::string& name, std::span<const std::string> overrides) {
  std::vector<Assignment> assignments = FileReader(name, text).read();
  for (Assignment& assignment : read_overrides(overrides)) assignments.push_back(std::move(assignment));

  Config given;
  apply_all(assignments, given);
  Config config;
  config.origin[""] = name;
  config.model = base_model(given);
  if (!config.model.hf_path.empty()) config.origin["model"] = config.model.hf_path + "/config.json";
  apply_all(assignments, config);
  return config;
}

void apply_overrides(Config& config, std::span<const std::string> overrides) {
  apply_all(read_overrides(overrides), config);
}

}  // namespace invar
