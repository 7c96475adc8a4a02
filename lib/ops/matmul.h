#pragma once

#include "core/range.h"
#include "core/tensor.h"
#include "device/stream.h"

namespace invar::ops {

enum class Transpose : bool { kNo = false, kYes = true };

// c (M, N) = op(a) (M, K) · op(b) (K, N) + beta · c.
//
// a and b are 2-D of equal dtype (f32 or bf16), c is f32 or bf16; products and sums are fp32, rounded once to c's
// dtype. beta is 0 (c may be uninitialised) or 1 (c must be f32: gradient accumulation, RN32(sum + c)).
// Bits: on the CPU every element of c is one fp32 chain of fused multiply-adds over ascending k, so it does not depend
// on M, N, the position of the element, or the number of threads. On a GPU bits are equal from run to run, and the
// order of a sum depends on sizes and layouts. On an invariant stream it does not: f32 sums are those of the CPU, bf16
// sums are one chain of tensor core steps of 16 over ascending k (ops/cuda/matmul_chain.h), by algorithms of cuBLASLt
// that were proved to give it, or by a slower kernel of our own where there is none.
void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta = 0.0f);

// c (M, N) = a[:, columns] (M, columns.size()) · b (columns.size(), N) + beta · c: the rules of matmul() of a copy of
// these columns, and its bits on the CPU and on an invariant stream.
void matmul_columns(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& c,
                    float beta = 0.0f);

}  // namespace invar::ops
