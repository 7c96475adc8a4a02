#include "config/hf_file.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"

namespace invar {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDownloadAgain = "download the model's config.json again";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(ErrorKind::kConfig, format("{}: cannot open the model's config", path),
                "model.hf_path must be a folder that holds a Hugging Face config.json");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Json parse_object(const std::string& path) {
  const std::string text = read_text(path);
  try {
    Json json = Json::parse(text);
    if (json.is_object()) return json;
  } catch (const Json::parse_error& error) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, text.size()));
    throw Error(ErrorKind::kConfig, format("{}:{}: not valid JSON", path, 1 + std::count(text.begin(), end, '\n')),
                kDownloadAgain);
  }
  throw Error(ErrorKind::kConfig, format("{}: not a JSON object", path), kDownloadAgain);
}

}  // namespace

struct HfFile::Node {
  std::string path;
  std::string prefix;  // of the names: "rope_parameters."; empty for the whole file
  Json json;
};

HfFile::HfFile(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

HfFile HfFile::open(const std::string& path) {
  return HfFile(std::make_shared<const Node>(Node{path, "", parse_object(path)}));
}

void HfFile::refuse(const std::string& what, const std::string& hint) const {
  throw Error(ErrorKind::kConfig, format("{}: {}", node_->path, what), hint);
}

void HfFile::refuse_type(const char* name, const char* type) const {
  refuse(format("{} must be {}, not {}", full_name(name), type, json(name)), kDownloadAgain);
}

bool HfFile::has(const char* name) const {
  return node_->json.contains(name) && !node_->json.at(name).is_null();
}

bool HfFile::is_null(const char* name) const {
  return node_->json.contains(name) && node_->json.at(name).is_null();
}

bool HfFile::is_object(const char* name) const {
  return has(name) && node_->json.at(name).is_object();
}

void HfFile::require(std::initializer_list<const char*> names) const {
  std::string missing;
  for (const char* name : names) {
    if (!has(name)) missing += (missing.empty() ? "" : ", ") + full_name(name);
  }
  if (!missing.empty()) refuse(format("missing {}", missing), "add the fields with the values of the model");
}

int64_t HfFile::integer(const char* name, int64_t absent) const {
  if (!has(name)) return absent;
  const Json& value = node_->json.at(name);
  constexpr auto kLargest = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= kLargest;
  if (!value.is_number_integer()) refuse_type(name, "an integer");
  if (!fits) refuse_type(name, "an integer below 2^63");
  return value.get<int64_t>();
}

double HfFile::number(const char* name, double absent) const {
  if (!has(name)) return absent;
  if (!node_->json.at(name).is_number()) refuse_type(name, "a number");
  return node_->json.at(name).get<double>();
}

bool HfFile::boolean(const char* name, bool absent) const {
  if (!has(name)) return absent;
  if (!node_->json.at(name).is_boolean()) refuse_type(name, "true or false");
  return node_->json.at(name).get<bool>();
}

std::string HfFile::text(const char* name, const std::string& absent) const {
  if (!has(name)) return absent;
  if (!node_->json.at(name).is_string()) refuse_type(name, "a string");
  return node_->json.at(name).get<std::string>();
}

std::vector<std::string> HfFile::texts(const char* name) const {
  if (!has(name)) return {};
  const Json& list = node_->json.at(name);
  const auto is_text = [](const Json& item) { return item.is_string(); };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_text)) refuse_type(name, "a list of strings");
  return list.get<std::vector<std::string>>();
}

HfFile HfFile::object(const char* name) const {
  if (!is_object(name)) refuse_type(name, "an object");
  return HfFile(std::make_shared<const Node>(Node{node_->path, full_name(name) + ".", node_->json.at(name)}));
}

std::vector<std::string> HfFile::names() const {
  std::vector<std::string> names;
  for (const auto& item : node_->json.items()) names.push_back(item.key());
  return names;
}

std::string HfFile::full_name(const char* name) const {
  return node_->prefix + name;
}

std::string HfFile::json(const char* name) const {
  return node_->json.contains(name) ? node_->json.at(name).dump() : "absent";
}

}  // namespace invar
