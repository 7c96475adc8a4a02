#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/error.h"
#include "core/unique_handle.h"

namespace invar {

static_assert(std::endian::native == std::endian::little, "data files are little endian and are not swapped");

void close_file(int descriptor);

// A regular file that is read by position. Nothing is mapped, so a file that shrinks or a disk that fails ends a read
// with an Error and never with a signal. One InputFile may be read from several threads.
class InputFile {
 public:
  // Throws Error{kind} with the path, the system's reason and the hint if the file is missing, unreadable, or not a
  // regular file. A pipe or a device is refused at once: opening never blocks.
  explicit InputFile(std::string path, std::string hint = "", ErrorKind kind = ErrorKind::kData);

  const std::string& path() const { return path_; }
  // Size in bytes when the file was opened.
  int64_t size() const { return size_; }

  // Fills `out` from byte `offset` on. Throws Error{kind} with the path and the reason if the file cannot be read
  // there. If the file has become shorter, the message has its size then and now.
  void read_at(int64_t offset, std::span<std::byte> out) const;
  // Tells the system that these bytes are read soon, so that a disk begins now. The answer does not matter.
  void will_read(int64_t offset, int64_t bytes) const;
  template <class T>
  void read_at(int64_t offset, std::span<T> out) const {
    read_at(offset, std::as_writable_bytes(out));
  }

  // The number stored at a byte offset, aligned or not.
  template <class T>
  T value(int64_t offset) const {
    T result;
    read_at(offset, std::span(&result, 1));
    return result;
  }

 private:
  std::string path_;
  std::string hint_;
  ErrorKind kind_;
  int64_t size_ = 0;
  UniqueHandle<int, close_file, -1> file_;
};

// The whole of a text file, through an InputFile. Throws Error{kind} with the path if it has more than `limit` bytes.
std::string read_text_file(const std::string& path, int64_t limit, const std::string& hint = "",
                           ErrorKind kind = ErrorKind::kData);

}  // namespace invar
