#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "core/error.h"

namespace invar {

static_assert(std::endian::native == std::endian::little, "data files are little endian and are not swapped");

// A file mapped read-only: opening costs nothing and all ranks of a node share its pages.
class MappedFile {
 public:
  // Error{kData} with the path, the reason and the hint if the file is missing, unreadable, empty or not a regular
  // file.
  explicit MappedFile(const std::string& path, const std::string& hint = "");

  const std::string& path() const { return path_; }
  int64_t size() const { return static_cast<int64_t>(data_.get_deleter().size); }
  const std::byte* data() const { return data_.get(); }
  std::span<const std::byte> bytes() const { return {data(), data_.get_deleter().size}; }

  // The number stored at a byte offset, aligned or not.
  template <class T>
  T value(int64_t offset) const {
    INVAR_CHECK(offset >= 0 && offset <= size() - static_cast<int64_t>(sizeof(T)), "{}: byte {}", path_, offset);
    T result;
    std::memcpy(&result, data() + offset, sizeof(T));
    return result;
  }

 private:
  struct Unmap {
    size_t size;
    void operator()(const std::byte* data) const;
  };

  std::string path_;
  std::unique_ptr<const std::byte, Unmap> data_;
};

}  // namespace invar
