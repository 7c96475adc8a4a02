#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace invar {

// Tokens of each sequence, seen where they lie: in a vector, or in an .idx file, whose numbers are not aligned.
class SequenceLengths {
 public:
  explicit SequenceLengths(std::span<const std::byte> int32s) : bytes_(int32s) {}
  explicit SequenceLengths(std::span<const int32_t> lengths) : bytes_(std::as_bytes(lengths)) {}

  int64_t size() const { return std::ssize(bytes_) / 4; }
  std::span<const std::byte> bytes() const { return bytes_; }
  int32_t operator[](int64_t sequence) const {
    int32_t length;
    std::memcpy(&length, bytes_.data() + 4 * sequence, 4);
    return length;
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace invar
