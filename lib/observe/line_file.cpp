#include "observe/line_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

#include "core/file_error.h"
#include "core/whole_write.h"

namespace invar {

namespace fs = std::filesystem;

LineFile::LineFile(fs::path path, TornLine torn) : path_(std::move(path)) {
  std::error_code error;
  fs::create_directories(path_.parent_path(), error);
  if (error) fail_file(kind_of_unusable(error.value()), path_, "its folder cannot be created", error.value());
  file_ = decltype(file_)(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOCTTY | O_CLOEXEC, 0644));
  if (!file_) fail_file(kind_of_unusable(errno), path_, "cannot be opened", errno);
  struct stat found {};
  if (::fstat(file_.get(), &found) != 0) fail_file(path_, "cannot be examined", errno);
  if (S_ISFIFO(found.st_mode)) {  // nobody may ever read it
    throw Error(ErrorKind::kConfig, format("{}: is a pipe", path_.string()), "remove it, or name another folder");
  }
  if (S_ISREG(found.st_mode) && torn == TornLine::kRemove) remove_torn_line(found.st_size);
}

void LineFile::remove_torn_line(off_t size) const {
  std::array<char, 4096> block;
  off_t end = size;
  while (end > 0) {
    const off_t begin = std::max<off_t>(0, end - std::ssize(block));
    const ssize_t got = ::pread(file_.get(), block.data(), static_cast<size_t>(end - begin), begin);
    if (got != end - begin) return;
    const size_t newline = std::string_view(block.data(), static_cast<size_t>(got)).rfind('\n');
    end = newline == std::string_view::npos ? begin : begin + static_cast<off_t>(newline) + 1;
    if (newline != std::string_view::npos) break;
  }
  if (end < size && ::ftruncate(file_.get(), end) != 0) fail_file(path_, "cannot be mended", errno);
}

void LineFile::write(const std::string& line) {
  const Written written = write_whole(file_.get(), line + "\n");
  if (written.error == 0) return;
  const off_t end = ::lseek(file_.get(), 0, SEEK_CUR);
  struct stat found {};
  if (written.bytes > 0 && ::fstat(file_.get(), &found) == 0 && found.st_size == end) {
    [[maybe_unused]] const int tried = ::ftruncate(file_.get(), end - static_cast<off_t>(written.bytes));
  }
  fail_file(path_, "cannot be written", written.error);
}

}  // namespace invar
