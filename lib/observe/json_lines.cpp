#include "observe/json_lines.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/error.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const fs::path& path, const char* what, int error,
                       std::source_location where = std::source_location::current()) {
  throw Error(ErrorKind::kFault, format("{}: {}: {}", path.string(), what, std::strerror(error)),
              "the run directory must be writable and its disk not full", where);
}

void remove_torn_line(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error || size == 0) return;  // a new file
  std::ifstream stream(path, std::ios::binary);
  auto end = size;
  while (end > 0) {
    stream.seekg(static_cast<std::streamoff>(end - 1));
    if (stream.get() == '\n') break;
    --end;
  }
  stream.close();
  if (end < size) fs::resize_file(path, end, error);
  if (error) fail(path, "cannot be mended", error.value());
}

}  // namespace

JsonLines::JsonLines(const fs::path& folder, const std::string& name, OpenMode mode)
    : path_(folder / (name + ".jsonl")) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail(folder, "cannot be created", error.value());
  if (mode == OpenMode::kAppend) {
    remove_torn_line(path_);
  } else if (fs::is_regular_file(fs::symlink_status(path_))) {
    fs::rename(path_, folder / (name + ".previous.jsonl"), error);
    if (error) fail(path_, "cannot be moved aside", error.value());
  }
  file_.reset(std::fopen(path_.c_str(), mode == OpenMode::kAppend ? "ab" : "wb"));
  if (!file_) fail(path_, "cannot be opened", errno);
}

void JsonLines::reopen() {
  remove_torn_line(path_);
  file_.reset(std::fopen(path_.c_str(), "ab"));
  if (!file_) fail(path_, "cannot be opened", errno);
}

// One write call a line, so that a reader of the growing file sees whole lines.
void JsonLines::write(const std::string& line) {
  if (file_ == nullptr) reopen();
  const std::string text = line + "\n";
  const bool done =
      std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0;
  if (done) return;
  const int error = errno;
  file_.reset();
  fail(path_, "cannot be written", error);
}

}  // namespace invar
