#include "core/pending_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/unique_handle.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const fs::path& file, const char* what,
                       std::source_location where = std::source_location::current()) {
  const int error = errno;
  const bool full = error == ENOSPC || error == EDQUOT;
  throw Error(ErrorKind::kFault, format("{}: {}: {}", file.string(), what, std::strerror(error)),
              full ? "free some space or write to another disk" : "", where);
}

}  // namespace

void sync_folder(const fs::path& folder) {
  const UniqueHandle<int, ::close, -1> descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor || ::fsync(descriptor.get()) != 0) fail(folder, "cannot sync the folder");
}

PendingFile::PendingFile(fs::path path) : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(temporary_, "cannot be created");
}

PendingFile::~PendingFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void PendingFile::write_at(std::span<const std::byte> bytes, int64_t offset) {
  INVAR_CHECK(descriptor_ >= 0, "{} is already published", path_.string());
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(temporary_, "cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
}

void PendingFile::publish() {
  INVAR_CHECK(descriptor_ >= 0, "{} is already published", path_.string());
  if (::fsync(descriptor_) != 0) fail(temporary_, "cannot be synced");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_, "cannot be renamed into place");
  ::close(descriptor_);
  descriptor_ = -1;
  sync_folder(path_.has_parent_path() ? path_.parent_path() : fs::path("."));
}

}  // namespace invar
