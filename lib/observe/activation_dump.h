#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace invar {

// Receives activations for parity tools. A layer that has one asks wants() with the tensor's name, and hands over the
// rows of the flat token dim that this rank holds. local is (t, ...), in host memory; its first row is token first_row.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  virtual bool wants(std::string_view name) const = 0;
  virtual void record(const std::string& name, const Tensor& local, int64_t first_row) = 0;
};

}  // namespace invar
