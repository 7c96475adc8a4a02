#pragma once

#include "core/tensor.h"
#include "device/stream.h"

namespace invar::ops {

enum class Transpose : bool { kNo = false, kYes = true };

// c (M, N) = op(a) (M, K) · op(b) (K, N) + beta · c.
//
// a and b are 2-D of equal dtype (f32 or bf16), c is f32 or bf16; products and sums are fp32, rounded once to c's
// dtype. beta is 0 (c may be uninitialised) or 1 (c must be f32: gradient accumulation, RN32(sum + c)).
// Bits: every element of c is one fp32 chain of fused multiply-adds over ascending k, so it does not depend on M, N,
// the position of the element, or the number of threads.
void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta = 0.0f);

}  // namespace invar::ops
