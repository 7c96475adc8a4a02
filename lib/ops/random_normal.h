#pragma once

#include "core/philox.h"
#include "core/range.h"
#include "core/tensor.h"
#include "device/stream.h"
#include "ops/logical_index.h"

namespace invar::ops {

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
