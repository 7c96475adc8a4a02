#include "core/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace invar {

namespace {

constexpr size_t kLargestRead = size_t{1} << 30;  // the system reads no more than 2^31 bytes at once

}  // namespace

void close_file(int descriptor) {
  ::close(descriptor);
}

InputFile::InputFile(std::string path, std::string hint, ErrorKind kind)
    : path_(std::move(path)), hint_(std::move(hint)), kind_(kind) {
  const auto refuse = [&](const std::string& what) { throw Error(kind_, format("{}: {}", path_, what), hint_); };
  file_ = decltype(file_)(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a pipe must not block here
  if (!file_) refuse(format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) refuse(format("cannot be looked at: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) refuse("not a regular file");
  size_ = status.st_size;
}

void InputFile::read_at(int64_t offset, std::span<std::byte> out) const {
  INVAR_CHECK(offset >= 0 && offset <= size_ && std::ssize(out) <= size_ - offset, "{}: bytes {} + {} of {}", path_,
              offset, out.size(), size_);
  while (!out.empty()) {
    const ssize_t got = ::pread(file_.get(), out.data(), std::min(out.size(), kLargestRead), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(kind_, format("{}: cannot be read at byte {}: {}", path_, offset, std::strerror(errno)), hint_);
    }
    if (got == 0) {
      struct stat status {};
      const int64_t now = ::fstat(file_.get(), &status) == 0 ? status.st_size : offset;
      throw Error(kind_, format("{}: the file has shrunk: {} bytes when it was opened, {} now", path_, size_, now),
                  "files must not change while invar reads them; restore the file, and replace files by renaming");
    }
    out = out.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

void InputFile::will_read(int64_t offset, int64_t bytes) const {
  (void)::posix_fadvise(file_.get(), offset, bytes, POSIX_FADV_WILLNEED);
}

std::string read_text_file(const std::string& path, int64_t limit, const std::string& hint, ErrorKind kind) {
  const InputFile file(path, hint, kind);
  if (file.size() > limit) {
    throw Error(kind, format("{}: {} bytes, where at most {} are expected", path, file.size(), limit), hint);
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, std::span(text));
  return text;
}

}  // namespace invar
