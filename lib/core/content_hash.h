#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/error.h"

namespace invar {

// A 64-bit hash of bytes, at the speed of memory. Damage to any one aligned word of eight bytes always changes it;
// nobody is kept from making other bytes of the same hash.
class ContentHash {
 public:
  // Bytes may come in pieces, each but the last a multiple of eight.
  void add(std::span<const std::byte> bytes) {
    INVAR_CHECK(size_ % sizeof(uint64_t) == 0, "bytes after a piece that ended at byte {}", size_);
    size_ += bytes.size();
    for (; bytes.size() >= sizeof(uint64_t); bytes = bytes.subspan(sizeof(uint64_t))) {
      uint64_t word;
      std::memcpy(&word, bytes.data(), sizeof(word));
      mix(word);
    }
    if (bytes.empty()) return;
    uint64_t rest = 0;
    std::memcpy(&rest, bytes.data(), bytes.size());
    mix(rest);
  }

  uint64_t value() const {
    ContentHash all = *this;
    all.mix(size_);
    return all.state_ ^ (all.state_ >> 32);
  }

 private:
  // One to one in the state and in the word, so that a change in either is never lost.
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 29;
  }

  uint64_t state_ = 0;
  uint64_t size_ = 0;
};

}  // namespace invar
