#pragma once

#include "device/stream.h"
#include "ops/head_view.h"

// What brings invar's layouts to those that cuDNN reads.
namespace invar::ops::cuda {

// Copies the heads of one view to another of the same heads. bf16; every head begins at 16 bytes.
void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to);

// to (batch, cols, rows) = from (batch, rows, cols), f32.
void transpose_batch(const Stream& stream, const float* from, float* to, int64_t batch, int64_t rows, int64_t cols);

}  // namespace invar::ops::cuda
