#include "checkpoint/run_directory.h"

#include <algorithm>
#include <charconv>
#include <fstream>

#include "core/error.h"
#include "core/pending_file.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kPending = ".tmp";
constexpr std::string_view kOld = ".old";
constexpr const char* kLatest = "latest";
constexpr const char* kIndexFile = "index.h5";

std::string name_of(int64_t step) {
  return format("{}{:08}", kPrefix, step);
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return step;
}

bool is_left_over(const std::string& name) {
  for (const std::string_view ending : {kPending, kOld}) {
    if (name.ends_with(ending) && step_of(std::string_view(name).substr(0, name.size() - ending.size()))) return true;
  }
  return false;
}

// As an Error with the hint that a person needs.
template <class Action>
void attempt(const fs::path& path, const char* what, Action action) {
  try {
    action();
  } catch (const fs::filesystem_error& error) {
    throw Error(ErrorKind::kFault, format("{}: {}: {}", path.string(), what, error.code().message()),
                "check checkpoint.dir, its permissions and the space on its disk");
  }
}

void write_latest(const fs::path& folder, const std::string& name) {
  const std::string text = name + "\n";
  PendingFile file(folder / kLatest);
  file.write_at(std::as_bytes(std::span(text)), 0);
  file.publish();
}

// First out of the way, so that no part of it can be taken for a checkpoint.
void remove_checkpoint(const fs::path& path) {
  const fs::path aside = path.string() + std::string(kOld);
  fs::rename(path, aside);
  fs::remove_all(aside);
}

}  // namespace

fs::path RunDirectory::path_of(int64_t step) const {
  return folder_ / name_of(step);
}

fs::path RunDirectory::pending_path_of(int64_t step) const {
  return folder_ / (name_of(step) + std::string(kPending));
}

std::vector<int64_t> RunDirectory::steps() const {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error)) {
    const std::optional<int64_t> step = step_of(entry->path().filename().string());
    if (step && fs::exists(entry->path() / kIndexFile)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<fs::path> RunDirectory::latest() const {
  std::string name;
  if (std::ifstream(folder_ / kLatest) >> name) {
    const fs::path path = folder_ / name;
    if (step_of(name) && fs::exists(path / kIndexFile)) return path;
    throw Error(ErrorKind::kData,
                format("{}: names {}, which is no checkpoint here", (folder_ / kLatest).string(), name),
                "write the name of another checkpoint into it, or remove it to take the newest one");
  }
  const std::vector<int64_t> complete = steps();
  if (complete.empty()) return std::nullopt;
  return path_of(complete.back());
}

void RunDirectory::prepare() const {
  attempt(folder_, "cannot be made ready for checkpoints", [&] {
    fs::create_directories(folder_);
    std::vector<fs::path> left_over;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      if (is_left_over(entry.path().filename().string())) left_over.push_back(entry.path());
    }
    for (const fs::path& path : left_over) fs::remove_all(path);
  });
}

void RunDirectory::publish(int64_t step) const {
  const fs::path path = path_of(step);
  attempt(path, "cannot be put into place", [&] {
    const fs::path aside = path.string() + std::string(kOld);
    if (fs::exists(path)) fs::rename(path, aside);
    fs::rename(pending_path_of(step), path);
    fs::remove_all(aside);
  });
  write_latest(folder_, name_of(step));
}

void RunDirectory::prune(int64_t step, int64_t keep, int64_t keep_every) const {
  std::vector<int64_t> complete = steps();
  std::erase_if(complete, [=](int64_t other) { return other > step; });
  const std::optional<fs::path> named = latest();
  const auto removable = std::ssize(complete) - keep;
  for (int64_t i = 0; i < removable; ++i) {
    const int64_t old = complete[static_cast<size_t>(i)];
    if ((keep_every > 0 && old % keep_every == 0) || path_of(old) == named) continue;
    attempt(path_of(old), "cannot be removed", [&] { remove_checkpoint(path_of(old)); });
  }
}

fs::path find_checkpoint(const fs::path& path) {
  if (fs::exists(path / kIndexFile)) return path;
  if (const auto latest = RunDirectory(path).latest()) return *latest;
  if (const auto latest = RunDirectory(path / "checkpoints").latest()) return *latest;
  throw Error(
      ErrorKind::kData,
      format("{}: neither a checkpoint (a folder with {}) nor a folder of checkpoints", path.string(), kIndexFile),
      "checkpoints are step_... folders in checkpoint.dir");
}

}  // namespace invar
