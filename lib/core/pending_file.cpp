#include "core/pending_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/file_error.h"
#include "core/unique_handle.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

// Never a file that is there already: what a killed process left goes first, and of a link the link.
int create_new(const fs::path& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int descriptor = ::open(path.c_str(), kFlags, 0644);
  if (descriptor >= 0 || errno != EEXIST || ::unlink(path.c_str()) != 0) return descriptor;
  return ::open(path.c_str(), kFlags, 0644);
}

}  // namespace

void sync_folder(const fs::path& folder) {
  const UniqueHandle<int, ::close, -1> descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor || ::fsync(descriptor.get()) != 0) fail_file(folder, "cannot sync the folder", errno);
}

PendingFile::PendingFile(fs::path path) : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  descriptor_ = create_new(temporary_);
  if (descriptor_ < 0) fail_file(temporary_, "cannot be created", errno);
}

PendingFile::~PendingFile() {
  if (descriptor_ < 0) return;
  const bool here = is_here();
  ::close(descriptor_);
  if (here) ::unlink(temporary_.c_str());
}

bool PendingFile::is_here() const {
  struct stat mine {
  }, named{};
  return ::fstat(descriptor_, &mine) == 0 && ::lstat(temporary_.c_str(), &named) == 0 && mine.st_dev == named.st_dev &&
         mine.st_ino == named.st_ino;
}

void PendingFile::write_at(std::span<const std::byte> bytes, int64_t offset) {
  INVAR_CHECK(descriptor_ >= 0, "{} is already published", path_.string());
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_file(temporary_, "cannot be written", errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
}

void PendingFile::publish() {
  INVAR_CHECK(descriptor_ >= 0, "{} is already published", path_.string());
  if (::fsync(descriptor_) != 0) fail_file(temporary_, "cannot be synced", errno);
  if (!is_here()) {
    throw Error(ErrorKind::kFault, format("{}: another process removed or replaced it", temporary_.string()),
                "let one process at a time write there");
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_file(path_, "cannot be renamed into place", errno);
  ::close(descriptor_);
  descriptor_ = -1;
  sync_folder(path_.has_parent_path() ? path_.parent_path() : fs::path("."));
}

void write_text_file(const fs::path& path, std::string_view text) {
  PendingFile file(path);
  file.write_at(std::as_bytes(std::span(text)), 0);
  file.publish();
}

}  // namespace invar
