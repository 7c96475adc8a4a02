#include "config/document_end.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <vector>

#include "core/json_object.h"
#include "core/presence.h"

namespace invar {
namespace {

namespace fs = std::filesystem;

// The vocabularies of the releases that presets name; those of a family have one.
struct Vocabulary {
  std::string_view family;
  int64_t size;
  int64_t document_end;
  std::string_view name;
};
constexpr std::array kReleased = {Vocabulary{"qwen3", 151936, 151643, "<|endoftext|>"},
                                  Vocabulary{"gemma4", 262144, 1, "<eos>"}};

// As in tools/tokenise.
constexpr std::array<std::string_view, 4> kNames = {"<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>"};

constexpr const char* kTokenizer = "tokenizer.json";

std::optional<JsonObject> open_if_there(const fs::path& file) {
  JsonRules rules{.kind = ErrorKind::kConfig, .fix = "download the file again, or set data.eod_id"};
  if (file.filename() == kTokenizer) rules.max_bytes = kLongJson;
  if (!is_there(file, rules.fix, rules.kind)) return std::nullopt;
  return JsonObject::open(file.string(), rules);
}

std::optional<int64_t> of_tokenizer(const JsonObject& tokenizer) {
  std::array<std::optional<int64_t>, kNames.size()> found;
  for (const JsonObject& token : tokenizer.objects("added_tokens")) {
    const auto* const name = std::ranges::find(kNames, token.text("content", ""));
    if (name != kNames.end()) found.at(static_cast<size_t>(name - kNames.begin())) = token.integer("id", -1);
  }
  const auto* const first = std::ranges::find_if(found, [](const auto& id) { return id.has_value(); });
  return first == found.end() ? std::nullopt : *first;
}

// eos_token_id, unless there are several.
std::optional<int64_t> of_config(const JsonObject& config) {
  constexpr const char* kField = "eos_token_id";
  if (config.is_list(kField)) {
    const std::vector<int64_t> ids = config.integers(kField);
    return ids.size() == 1 ? std::optional(ids.front()) : std::nullopt;
  }
  if (config.has(kField)) return config.integer(kField);
  return config.is_object("text_config") ? of_config(config.object("text_config")) : std::nullopt;
}

}  // namespace

std::optional<DocumentEnd> model_document_end(const ModelConfig& model) {
  if (model.preset.empty() && model.hf_path.empty()) return std::nullopt;
  const auto told_by = [&](const char* name, const auto& read) -> std::optional<DocumentEnd> {
    if (model.hf_path.empty()) return std::nullopt;
    const fs::path path = fs::path(model.hf_path) / name;
    const auto file = open_if_there(path);
    const std::optional<int64_t> id = file ? read(*file) : std::nullopt;
    return id ? std::optional(DocumentEnd{*id, path.string()}) : std::nullopt;
  };
  // First what is of this very model, which may have a tokenizer of its own.
  if (auto told = told_by(kTokenizer, of_tokenizer)) return told;
  for (const Vocabulary& known : kReleased) {
    if (known.family == model.family && known.size == model.vocab_size) {
      return DocumentEnd{known.document_end, format("the vocabulary of {}'s releases ({})", known.family, known.name)};
    }
  }
  if (auto told = told_by("config.json", of_config)) return told;
  return told_by("generation_config.json", of_config);
}

}  // namespace invar
