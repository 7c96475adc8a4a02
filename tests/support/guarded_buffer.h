#pragma once

#include <cstring>
#include <vector>

#include "core/tensor.h"

namespace invar {

// `count` elements of host memory between two guards, so that a write outside of them is seen.
template <class T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(int64_t count) : count_(count), memory_(static_cast<size_t>(count + 2 * kGuard)) {
    std::memset(static_cast<void*>(memory_.data()), kPattern, memory_.size() * sizeof(T));
  }
  // Element i is value(i).
  template <class F>
  GuardedBuffer(int64_t count, F value) : GuardedBuffer(count) {
    for (int64_t i = 0; i < count; ++i) data()[i] = value(i);
  }

  int64_t count() const { return count_; }
  T* data() { return memory_.data() + kGuard; }
  const T* data() const { return memory_.data() + kGuard; }
  Tensor tensor() { return part(0, count_); }
  Tensor part(int64_t begin, int64_t count) {
    return Tensor(data() + begin, DTypeOf<T>::value, DeviceType::kCpu, {count});
  }

  bool guards_intact() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory_.data());
    const size_t guard = kGuard * sizeof(T);
    const size_t size = memory_.size() * sizeof(T);
    for (size_t i = 0; i < guard; ++i) {
      if (bytes[i] != kPattern || bytes[size - 1 - i] != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 8;
  static constexpr unsigned char kPattern = 0xa5;

  int64_t count_;
  std::vector<T> memory_;
};

}  // namespace invar
