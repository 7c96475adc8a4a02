#include "checkpoint/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/error.h"
#include "core/pending_file.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kPending = ".tmp";
constexpr std::string_view kOld = ".old";
constexpr const char* kLatest = "latest";
constexpr const char* kLock = "lock";

std::string name_of(int64_t step) {
  return format("{}{:08}", kPrefix, step);
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || name != format("{:08}", step)) return std::nullopt;
  return step;
}

// The step of a folder that an interrupted save or removal left, step_N and this ending.
std::optional<int64_t> step_of_left_over(std::string_view name, std::string_view ending) {
  return name.ends_with(ending) ? step_of(name.substr(0, name.size() - ending.size())) : std::nullopt;
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

bool is_complete(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path / kIndexFile, ignored);
}

// Surely not one; a file system that does not answer says nothing.
bool is_incomplete(const fs::path& path) {
  std::error_code error;
  return !fs::exists(path / kIndexFile, error) && !error;
}

fs::path aside(const fs::path& path) {
  return path.string() + std::string(kOld);
}

// What could not be removed, for a person.
void remove_quietly(const fs::path& path, std::string& problems) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) problems += format("{}{}: {}", problems.empty() ? "" : "; ", path.string(), error.message());
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
    if (step && is_complete(entry->path())) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<fs::path> RunDirectory::latest() const {
  std::string name;
  if (std::ifstream(folder_ / kLatest) >> name) {
    const fs::path path = folder_ / name;
    if (step_of(name) && is_complete(path)) return path;
    if (step_of(name) && is_complete(aside(path))) return aside(path);  // killed while another took its place
    throw Error(ErrorKind::kData,
                format("{}: names {}, which is no checkpoint here", (folder_ / kLatest).string(), name),
                "write the name of another checkpoint into it, or remove it to take the newest one");
  }
  const std::vector<int64_t> complete = steps();
  if (complete.empty()) return std::nullopt;
  return path_of(complete.back());
}

void RunDirectory::prepare(int64_t step) const {
  attempt(folder_, "cannot be made ready for checkpoints", [&] {
    fs::create_directories(folder_);
    (void)clean_up();  // what cannot be removed takes space, no more
    fs::remove_all(pending_path_of(step));
    fs::create_directory(pending_path_of(step));
  });
}

void RunDirectory::publish(int64_t step) const {
  const fs::path path = path_of(step);
  attempt(path, "cannot be put into place", [&] {
    if (fs::exists(path)) fs::rename(path, aside(path));
    fs::rename(pending_path_of(step), path);
  });
  sync_folder(folder_);
  write_latest(folder_, name_of(step));
}

std::string RunDirectory::clean_up() const {
  std::string problems;
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(entry->path());
  }
  for (const fs::path& path : entries) {
    const std::string name = path.filename().string();
    const std::optional<int64_t> old = step_of_left_over(name, kOld);
    if (old && is_complete(path) && is_incomplete(path_of(*old))) {
      fs::rename(path, path_of(*old), error);  // killed before the new one was in its place
    } else if ((old && (is_complete(path_of(*old)) || is_incomplete(path))) || step_of_left_over(name, kPending) ||
               (step_of(name) && is_incomplete(path))) {
      remove_quietly(path, problems);
    }
  }
  return problems;
}

std::string RunDirectory::prune(int64_t step, int64_t keep, int64_t keep_every) const {
  std::vector<int64_t> complete = steps();
  std::erase_if(complete, [=](int64_t other) { return other > step; });
  const std::optional<fs::path> named = latest();
  std::string problems;
  const auto removable = std::ssize(complete) - keep;
  for (int64_t i = 0; i < removable; ++i) {
    const int64_t old = complete[static_cast<size_t>(i)];
    if ((keep_every > 0 && old % keep_every == 0) || path_of(old) == named) continue;
    // Its index first, so that no part of it can be taken for a checkpoint. A link is all that goes of one kept
    // elsewhere.
    if (!fs::is_symlink(path_of(old))) remove_quietly(path_of(old) / kIndexFile, problems);
    if (problems.empty()) remove_quietly(path_of(old), problems);
  }
  return problems;
}

RunDirectory::Lock RunDirectory::lock(std::chrono::milliseconds patience) const {
  attempt(folder_, "cannot be made", [&] { fs::create_directories(folder_); });
  const fs::path path = folder_ / kLock;
  Lock lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock) {
    throw Error(ErrorKind::kFault, format("{}: cannot be created: {}", path.string(), std::strerror(errno)),
                "check checkpoint.dir, its permissions and the space on its disk");
  }
  constexpr std::chrono::milliseconds kPause(200);
  for (auto waited = kPause * 0; ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0; waited += kPause) {
    if (errno != EWOULDBLOCK && errno != EINTR) break;  // a file system without locks
    if (waited >= patience) {
      throw Error(ErrorKind::kConfig, format("{}: another run saves its checkpoints here", folder_.string()),
                  "end the other one, or give this one a checkpoint.dir or log.dir of its own");
    }
    std::this_thread::sleep_for(kPause);
  }
  return lock;
}

fs::path find_checkpoint(const fs::path& path) {
  fs::path folder = path.lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();  // a slash at the end
  if (is_complete(folder)) return folder;
  if (const auto latest = RunDirectory(folder).latest()) return *latest;
  if (const auto latest = RunDirectory(folder / "checkpoints").latest()) return *latest;
  throw Error(
      ErrorKind::kData,
      format("{}: neither a checkpoint (a folder with {}) nor a folder of checkpoints", path.string(), kIndexFile),
      "checkpoints are step_... folders in checkpoint.dir");
}

}  // namespace invar
