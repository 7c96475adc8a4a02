#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "core/error.h"
#include "core/pending_file.h"

namespace invar {

namespace fs = std::filesystem;

std::vector<HfShard> plan_hf_shards(const std::vector<SafetensorsSpec>& tensors, int64_t max_shard_bytes) {
  INVAR_CHECK(max_shard_bytes > 0, "shards of {} bytes", max_shard_bytes);
  std::vector<HfShard> shards(1);
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (!shards.back().tensors.empty() && tensor.bytes() > max_shard_bytes - bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes();
    shards.back().tensors.push_back(tensor);
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1 ? std::string(safetensors::kSingleFile)
                                        : format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

namespace {

constexpr const char* kOwner = ".invar_export";

bool is_of(const fs::path& folder, const std::string& owner) {
  std::string found;
  return !owner.empty() && std::getline(std::ifstream(folder / kOwner), found) && found == owner;
}

}  // namespace

void prepare_hf_folder(const fs::path& folder, const std::string& key, const std::string& owner) {
  const auto refuse = [&](const std::string& reason) {
    throw Error(ErrorKind::kConfig, format("{} = {} {}", key, folder.string(), reason),
                "name a folder, new or without weights, where this user may write");
  };
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse("cannot be created: " + error.message());
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path& path = entry->path();
    if (path.extension() == ".safetensors" && !is_of(folder, owner))
      refuse(format("holds {} already", path.filename().string()));
  }
  if (error) refuse("cannot be read: " + error.message());
  try {
    const PendingFile probe(folder / ".invar_probe");
  } catch (const Error& unusable) {
    refuse(format("cannot be written: {}", unusable.what()));
  }
}

void claim_hf_folder(const fs::path& folder, const std::string& key, const std::string& owner) {
  prepare_hf_folder(folder, key, owner);  // others may have been quicker
  std::error_code ignored;
  if (is_of(folder, owner)) {
    fs::remove(folder / safetensors::kIndexFile, ignored);
    for (fs::directory_iterator entry(folder, ignored), end; entry != end; entry.increment(ignored)) {
      const std::string name = entry->path().filename().string();
      const bool is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
      if (is_shard || name == safetensors::kSingleFile) fs::remove(entry->path(), ignored);
    }
  }
  fs::remove(folder / kOwner, ignored);
  if (!owner.empty()) write_text_file(folder / kOwner, owner + "\n");
}

void write_hf_index(const fs::path& folder, const std::vector<HfShard>& shards) {
  if (shards.size() < 2) return;
  if (fs::exists(folder / safetensors::kSingleFile)) {
    throw Error(ErrorKind::kData,
                format("{}: a {} lies beside the new shards and would be loaded instead of them", folder.string(),
                       safetensors::kSingleFile),
                "remove it, or export to an empty folder");
  }
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total_size = 0;
  for (const auto& shard : shards) {
    INVAR_CHECK(fs::exists(folder / shard.file), "{}: shard {} was not written", folder.string(), shard.file);
    for (const auto& tensor : shard.tensors) {
      INVAR_CHECK(!weight_map.contains(tensor.name), "tensor '{}' is in two shards", tensor.name);
      weight_map[tensor.name] = shard.file;
      total_size += tensor.bytes();
    }
  }
  const nlohmann::json index{{"metadata", {{"total_size", total_size}}}, {"weight_map", weight_map}};
  write_text_file(folder / safetensors::kIndexFile, index.dump(2) + "\n");
}

}  // namespace invar
