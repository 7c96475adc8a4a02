#include "train/run_outputs.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/file_error.h"
#include "observe/metrics.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kDump = "dump_step_";
constexpr std::string_view kBlockHashes = "hash_step_";
constexpr std::string_view kOfStep = ".h5";

fs::path path_of(const fs::path& folder, std::string_view kind, int64_t step) {
  return folder / format("{}{:08}{}", kind, step, kOfStep);
}

bool is_of_step(std::string_view name, std::string_view kind) {
  if (!name.starts_with(kind) || !name.ends_with(kOfStep) || name.size() <= kind.size() + kOfStep.size()) return false;
  name = name.substr(kind.size(), name.size() - kind.size() - kOfStep.size());
  return std::ranges::all_of(name, [](char c) { return '0' <= c && c <= '9'; });
}

bool is_output(const std::string& name) {
  static constexpr std::array kNames = {kConfigFile, MetricsWriter::kMetricsFile, StateHashWriter::kStateHashesFile};
  return std::ranges::find(kNames, name) != kNames.end() || is_of_step(name, kDump) || is_of_step(name, kBlockHashes);
}

fs::path numbered(const fs::path& path, int number) {
  return path.parent_path() / format("{}.{}{}", path.stem().string(), number, path.extension().string());
}

}  // namespace

fs::path dump_path(const fs::path& run_directory, int64_t step) {
  return path_of(run_directory, kDump, step);
}

fs::path block_hashes_path(const fs::path& run_directory, int64_t step) {
  return path_of(run_directory, kBlockHashes, step);
}

std::string keep_earlier_run(const fs::path& run_directory) {
  std::vector<fs::path> outputs;
  std::error_code error;
  for (fs::directory_iterator entry(run_directory, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;  // a device, say, has nothing to keep
    if (is_output(entry->path().filename().string()) && fs::is_regular_file(entry->path(), ignored)) {
      outputs.push_back(entry->path());
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) fail_file(run_directory, "cannot be read", error.value());
  if (outputs.empty()) return "";
  std::ranges::sort(outputs);
  const auto taken = [&](int number) {
    return std::ranges::any_of(outputs, [&](const fs::path& path) {
      std::error_code unknown;
      const fs::path name = numbered(path, number);
      const fs::file_type type = fs::symlink_status(name, unknown).type();
      if (type == fs::file_type::none) fail_file(name, "cannot be looked for", unknown.value());
      return type != fs::file_type::not_found;
    });
  };
  int number = 1;
  while (taken(number)) ++number;
  std::string names;
  for (const fs::path& path : outputs) {
    fs::rename(path, numbered(path, number), error);
    if (error) fail_file(path, "cannot be moved aside", error.value());
    names += (names.empty() ? "" : ", ") + numbered(path, number).filename().string();
  }
  return format("an earlier run in {} is kept as {}", run_directory.string(), names);
}

}  // namespace invar
