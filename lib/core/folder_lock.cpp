#include "core/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <thread>

#include "core/file_error.h"

namespace invar {

namespace fs = std::filesystem;

FolderLock lock_file(const fs::path& path, std::optional<std::chrono::milliseconds> patience) {
  std::error_code error;
  const fs::path folder = path.parent_path();
  fs::create_directories(folder, error);
  if (error) fail_file(kind_of_unusable(error.value()), folder, "cannot be made", error.value());
  FolderLock lock(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!lock) fail_file(kind_of_unusable(errno), path, "cannot be created", errno);
  constexpr std::chrono::milliseconds kPause(200);
  for (auto waited = kPause * 0; ::flock(lock.get(), patience ? LOCK_EX | LOCK_NB : LOCK_EX) != 0;) {
    if (errno == EINTR) continue;
    if (!patience) fail_file(kind_of_unusable(errno), path, "cannot be locked", errno);
    if (errno != EWOULDBLOCK) break;  // a file system without locks
    if (waited >= *patience) return {};
    std::this_thread::sleep_for(kPause);
    waited += kPause;
  }
  return lock;
}

FolderLock lock_folder(const fs::path& folder, const std::string& in_use, const std::string& hint,
                       std::chrono::milliseconds patience) {
  FolderLock lock = lock_file(folder / "lock", patience);
  if (!lock) throw Error(ErrorKind::kConfig, format("{}: {}", folder.string(), in_use), hint);
  return lock;
}

}  // namespace invar
