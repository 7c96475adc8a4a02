#pragma once

#include "core/philox.h"
#include "core/range.h"
#include "core/tensor.h"
#include "device/stream.h"

namespace invar::ops {

// Which element of a logical tensor, counted row-major, an element (row, col) of its storage is.
struct LogicalIndex {
  int64_t first = 0;
  int64_t row_stride = 0;
  int64_t block = 1;  // columns that are neighbours in the logical tensor too
  int64_t block_stride = 0;

  constexpr int64_t at(int64_t row, int64_t col) const {
    return first + row * row_stride + col / block * block_stride + col % block;
  }
};

// Element i of the logical tensor is mean + std · random.normal(i), of `zeros` it is 0.
struct NormalValues {
  Philox random;
  double mean = 0;
  double std = 1;
  LogicalIndex index{};
  Range zeros{};
};

// out (rows, cols), f32 or bf16: rounded to f32 and then to its dtype. Bits are the same on CPUs and GPUs.
void random_normal(const Stream& stream, const NormalValues& values, const Tensor& out);

}  // namespace invar::ops
