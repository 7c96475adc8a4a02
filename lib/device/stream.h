#pragma once

#include "core/tensor.h"

namespace invar {

// Order of execution on one device. On the CPU every operation is done when it returns, and a stream only says how
// many threads an operation may use; on meta nothing runs.
class Stream {
 public:
  explicit Stream(DeviceType device, int threads = 1) : device_(device), threads_(threads) {}

  DeviceType device() const { return device_; }
  int threads() const { return threads_; }
  void synchronize() const {}

 private:
  DeviceType device_;
  int threads_;
};

}  // namespace invar
