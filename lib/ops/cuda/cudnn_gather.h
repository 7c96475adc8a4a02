#pragma once

#include "device/stream.h"

// What brings invar's layouts to those that cuDNN reads.
namespace invar::ops::cuda {

// to (batch, cols, rows) = from (batch, rows, cols), f32.
void transpose_batch(const Stream& stream, const float* from, float* to, int64_t batch, int64_t rows, int64_t cols);

}  // namespace invar::ops::cuda
