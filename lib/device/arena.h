#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/tensor.h"

namespace invar {

// Error{kFault}: memory that cannot be had.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// A block of device memory from which tensors are cut one after another, and given back in reverse (mark, release).
// One arena is one kind of memory ("parameters", "saved activations", "scratch"); its size is found by a run on meta,
// where an arena has no bytes and no limit.
class Arena {
 public:
  using Mark = int64_t;

  // Zero-filled. Throws OutOfMemory with the name and size.
  Arena(std::string name, DeviceType device, int64_t capacity_bytes);
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();

  // Uninitialised after a release; aligned to kAlignment. Throws Error{kFault} naming arena, label and sizes when full,
  // Error{kConfig} if the sizes cannot be counted, beyond 2^56 bytes.
  Tensor allocate(std::string_view label, DType dtype, std::initializer_list<int64_t> shape);

  Mark mark() const { return used_; }
  void release(Mark mark);

  const std::string& name() const { return name_; }
  DeviceType device() const { return device_; }
  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t high_water() const { return high_water_; }

  static constexpr int64_t kAlignment = 256;

 private:
  std::string name_;
  DeviceType device_ = DeviceType::kCpu;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t high_water_ = 0;
  std::byte* base_ = nullptr;
};

// Gives back on leaving a scope what was allocated inside it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace invar
