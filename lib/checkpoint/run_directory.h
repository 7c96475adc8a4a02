#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/folder_lock.h"

namespace invar {

// Of a checkpoint; a folder that has one is complete.
inline constexpr const char* kIndexFile = "index.h5";

// What was done to the folders of a run's checkpoints beside saving one, for a person; mostly nothing.
struct CleanUp {
  std::string done;      // "removed step_00000100, ..."
  std::string problems;  // what could not be removed, and why; what was in the way of a save
};

// The folder of a run's checkpoints: step_00000100/, step_00000200/, ... and `latest`, a text file with the name of
// one. A folder of that name is complete: it is written as step_00000100.tmp and renamed when all of it is on disk, and
// renamed back before it is removed. So one without an index is not of invar's making, perhaps a checkpoint that is
// just being copied in, and stays. Nor is a folder removed that holds anything but files that invar writes. What is in
// the way of a save moves to a free name, step_00000100.tmp.1 and so on, which `problems` tells.
//
// What cannot be read does not count as missing: Error{kData} with the system's reason.
class RunDirectory {
 public:
  explicit RunDirectory(std::filesystem::path folder) : folder_(std::move(folder)) {}

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path path_of(int64_t step) const;
  std::filesystem::path pending_path_of(int64_t step) const;
  // Steps with a complete checkpoint, ascending; none if there is no folder.
  std::vector<int64_t> steps() const;
  // What `latest` names, or the newest complete one if there is no `latest`. Error{kData} if it names none that is
  // there.
  std::optional<std::filesystem::path> latest() const;

  // An empty pending folder for a step, after clean_up(), whose problems it leaves to the next one. System errors throw
  // Error{kFault}.
  CleanUp prepare(int64_t step) const;
  // Renames the pending folder of a step, over an older one of that step, and moves `latest` to it. System errors throw
  // Error{kFault}.
  CleanUp publish(int64_t step) const;
  // Removes the pending folder of a step whose save failed.
  void discard(int64_t step) const;
  // Removes what interrupted saves left, and puts back what one had moved aside.
  CleanUp clean_up() const;
  // Of the checkpoints up to `step` removes all but the newest `keep`, the multiples of keep_every (0: none) and what
  // `latest` names. Later ones are of a run that went on from here before; they stay.
  CleanUp prune(int64_t step, int64_t keep, int64_t keep_every) const;

  // Makes room for a run that begins anew. It moves the checkpoints of an earlier run, and `latest`, into a new folder
  // earlier.1, earlier.2 and so on. checkpoint.resume can name that folder. If there are no checkpoints, it only cleans
  // up. System errors throw Error{kFault}.
  CleanUp set_aside() const;

  // See lock_folder().
  FolderLock lock(std::chrono::milliseconds patience = std::chrono::seconds(10)) const;

 private:
  std::filesystem::path folder_;
};

// A checkpoint's own folder (with or without a slash at the end), or that of the latest one of a folder of checkpoints.
// Error{kData} if it is neither.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

}  // namespace invar
