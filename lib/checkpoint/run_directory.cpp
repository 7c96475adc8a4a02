#include "checkpoint/run_directory.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "checkpoint/checkpoint_index.h"
#include "core/error.h"
#include "core/pending_file.h"
#include "core/presence.h"
#include "core/shown.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kPending = ".tmp";
constexpr std::string_view kOld = ".old";
constexpr const char* kLatest = "latest";
constexpr int64_t kLongestLatest = 4096;  // bytes

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
  write_text_file(folder / kLatest, name + "\n");
}

constexpr const char* kUnreadable = "make it readable again; to begin anew, use another checkpoint.dir";

bool is_complete(const fs::path& path) {
  return is_there(path, kUnreadable) && is_there(path / kIndexFile, kUnreadable);
}

// The entries of a folder; none if there is no folder.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(entry->path());
  }
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    throw Error(ErrorKind::kData, format("{}: cannot be read: {}", folder.string(), error.message()), kUnreadable);
  }
  return entries;
}

fs::path aside(const fs::path& path) {
  return path.string() + std::string(kOld);
}

// Names of files in a checkpoint, of any format and while they are written.
bool is_own_file(const fs::path& path) {
  std::string name = path.filename().string();
  if (name.ends_with(kPending)) name.resize(name.size() - kPending.size());
  if (name == kIndexFile || name == "index.bin" || name == "index.crc32") return true;
  int rank = 0;
  return std::sscanf(name.c_str(), "shard_%d", &rank) == 1 && name == ShardFile::name_of(rank);
}

void add(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : "; ") + item;
}

// What keeps a checkpoint, whole or not, from being removed: anything in it that invar did not write.
std::optional<std::string> obstacle_in(const fs::path& path) {
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(path, error)))
    return std::nullopt;  // of one kept elsewhere the link alone goes
  if (!fs::is_directory(path)) return format("{} stays: it is no folder, and not of invar's writing", path.string());
  for (const fs::path& file : entries_of(path)) {
    if (is_own_file(file) && fs::symlink_status(file, error).type() == fs::file_type::regular) continue;
    return format("{} stays: {} in it is not of invar's writing", path.string(), shown(file.filename().string()));
  }
  return std::nullopt;
}

// Removes a checkpoint, whole or not, that is known by this name.
void remove_folder(const fs::path& path, const std::string& name, CleanUp& result) {
  if (const auto obstacle = obstacle_in(path)) return add(result.problems, *obstacle);
  if (!fs::is_symlink(fs::symlink_status(path))) {
    for (const fs::path& file : entries_of(path)) fs::remove(file);
  }
  fs::remove(path);
  add(result.done, "removed " + name);
}

// A name that nothing has: PATH.1, PATH.2 and so on.
fs::path free_name(const fs::path& path) {
  int number = 1;
  const auto numbered = [&] { return fs::path(format("{}.{}", path.string(), number)); };
  while (fs::exists(fs::symlink_status(numbered()))) ++number;
  return numbered();
}

// What lies where a save writes goes to a free name: it costs no checkpoint, and is not lost.
void move_obstacle(const fs::path& path, CleanUp& result) {
  if (!fs::exists(fs::symlink_status(path))) return;
  const fs::path free = free_name(path);
  fs::rename(path, free);
  add(result.problems, format("{} was in the way of a save and is {} now", path.string(), free.filename().string()));
}

// Whatever fails is told, and the rest goes on.
template <class Action>
void attempt_quietly(CleanUp& result, Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    add(result.problems, error.what());
  }
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
  for (const fs::path& path : entries_of(folder_)) {
    const std::optional<int64_t> step = step_of(path.filename().string());
    if (step && is_complete(path)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<fs::path> RunDirectory::latest() const {
  const fs::path file = folder_ / kLatest;
  if (is_there(file, kUnreadable)) {
    const std::string text = read_text_file(file.string(), kLongestLatest, kUnreadable);
    const std::string name = text.substr(0, text.find_first_of(" \t\r\n"));
    const fs::path path = folder_ / name;
    if (step_of(name) && is_complete(path)) return path;
    if (step_of(name) && is_complete(aside(path))) return aside(path);  // killed while another took its place
    throw Error(ErrorKind::kData, format("{}: names {}, which is no checkpoint here", file.string(), shown(name)),
                "write the name of another checkpoint into it, or remove it to take the newest one");
  }
  const std::vector<int64_t> complete = steps();
  if (complete.empty()) return std::nullopt;
  return path_of(complete.back());
}

CleanUp RunDirectory::prepare(int64_t step) const {
  const fs::path pending = pending_path_of(step);
  CleanUp result;
  attempt(folder_, "cannot be made ready for checkpoints", [&] {
    fs::create_directories(folder_);
    result.done = clean_up().done;  // its problems stay, and are told after the save
    move_obstacle(pending, result);
    fs::create_directory(pending);
  });
  return result;
}

CleanUp RunDirectory::publish(int64_t step) const {
  const fs::path path = path_of(step);
  CleanUp result;
  attempt(path, "cannot be put into place", [&] {
    std::error_code unknown;
    const bool takes_place_of_another = fs::exists(path / kIndexFile, unknown);
    move_obstacle(takes_place_of_another ? aside(path) : path, result);
    if (takes_place_of_another) fs::rename(path, aside(path));
    fs::rename(pending_path_of(step), path);
  });
  sync_folder(folder_);
  write_latest(folder_, name_of(step));
  return result;
}

void RunDirectory::discard(int64_t step) const {
  CleanUp ignored;  // the failure itself is what matters
  attempt_quietly(ignored, [&] { remove_folder(pending_path_of(step), "", ignored); });
}

CleanUp RunDirectory::clean_up() const {
  CleanUp result;
  for (const fs::path& path : entries_of(folder_)) {
    const std::string name = path.filename().string();
    attempt_quietly(result, [&] {
      const std::optional<int64_t> old = step_of_left_over(name, kOld);
      if (old && is_complete(path) && !is_there(path_of(*old), kUnreadable)) {
        fs::rename(path, path_of(*old));  // killed before the new one was in its place
        add(result.done, format("put {} back", path_of(*old).filename().string()));
      } else if ((old && (is_complete(path_of(*old)) || !is_complete(path))) || step_of_left_over(name, kPending)) {
        remove_folder(path, name, result);
      }
    });
  }
  return result;
}

CleanUp RunDirectory::prune(int64_t step, int64_t keep, int64_t keep_every) const {
  std::vector<int64_t> complete = steps();
  std::erase_if(complete, [=](int64_t other) { return other > step; });
  const std::optional<fs::path> named = latest();
  CleanUp result;
  const auto removable = std::ssize(complete) - keep;
  for (int64_t i = 0; i < removable; ++i) {
    const int64_t old = complete[static_cast<size_t>(i)];
    if ((keep_every > 0 && old % keep_every == 0) || path_of(old) == named) continue;
    attempt_quietly(result, [&] {
      if (const auto obstacle = obstacle_in(path_of(old))) return add(result.problems, *obstacle);
      fs::rename(path_of(old), pending_path_of(old));  // so that no part of it can be taken for a checkpoint
      remove_folder(pending_path_of(old), name_of(old), result);
    });
  }
  return result;
}

CleanUp RunDirectory::set_aside() const {
  CleanUp result = clean_up();
  std::vector<fs::path> earlier;
  for (const fs::path& path : entries_of(folder_)) {
    const std::string name = path.filename().string();
    if (step_of(name) && is_complete(path)) earlier.push_back(path);
  }
  if (earlier.empty()) return result;
  attempt(folder_, "earlier checkpoints cannot be set aside", [&] {
    const fs::path kept = free_name(folder_ / "earlier");
    fs::create_directory(kept);
    // `latest` moves first: if the process is killed in between, it never names a checkpoint that has moved.
    if (is_there(folder_ / kLatest, kUnreadable)) earlier.insert(earlier.begin(), folder_ / kLatest);
    for (const fs::path& path : earlier) fs::rename(path, kept / path.filename());
    add(result.done, format("those of an earlier run are kept in {}", kept.string()));
  });
  sync_folder(folder_);
  return result;
}

FolderLock RunDirectory::lock(std::chrono::milliseconds patience) const {
  return lock_folder(folder_, "another run saves its checkpoints here",
                     "end the other one, or give this one a checkpoint.dir or log.dir of its own", patience);
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
