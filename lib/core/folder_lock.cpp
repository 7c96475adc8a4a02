#include "core/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <thread>

#include "core/file_error.h"

namespace invar {

namespace fs = std::filesystem;

FolderLock lock_folder(const fs::path& folder, const std::string& in_use, const std::string& hint,
                       std::chrono::milliseconds patience) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail_file(kind_of_unusable(error.value()), folder, "cannot be made", error.value());
  const fs::path path = folder / "lock";
  FolderLock lock(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!lock) fail_file(kind_of_unusable(errno), path, "cannot be created", errno);
  constexpr std::chrono::milliseconds kPause(200);
  for (auto waited = kPause * 0; ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0; waited += kPause) {
    if (errno != EWOULDBLOCK && errno != EINTR) break;  // a file system without locks
    if (waited >= patience) throw Error(ErrorKind::kConfig, format("{}: {}", folder.string(), in_use), hint);
    std::this_thread::sleep_for(kPause);
  }
  return lock;
}

}  // namespace invar
