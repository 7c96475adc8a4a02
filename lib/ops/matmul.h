#pragma once

#include <span>

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

// c (M, N) = op(a[:, columns]) · b (K, N) + beta · c, where the columns are K or, transposed, M: the rules of matmul()
// of a copy of these columns, and its bits on the CPU and on an invariant stream.
void matmul_columns(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
                    const Tensor& c, float beta = 0.0f);

// terms (S, M, N) f32: terms[s] = aᵀ · b of the tokens of sample s, where a (T, ·), of which only `columns` (M) are
// there, and b (T, N) have S samples of T / S tokens, one after another: the rules of matmul_columns(), transposed. On
// the CPU and on an invariant stream it has the bits that matmul_columns() gives each sample.
void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms);

// A step of a sum over leaves of k, which has a stack of sums: the product over `columns` of a goes to `buffer`, a new
// one or the last (then it is added to what is there), and `joins` times the last sum is added to the one below.
struct LeafStep {
  Range columns;
  int buffer = 0;
  bool accumulate = false;
  int joins = 0;
};
// nodes[i] (M, N) f32, or bf16 where sums are rounded once = what the steps leave of a (M, K) · b, where a leaf's rows
// of b (K, N) are those of its columns of a, and a leaf is rounded to `leaf` (f32 or bf16) before it is added. False,
// and nothing is done, where there is no faster way than the one whose bits it has: matmul_columns() a leaf at a time,
// additions in fp32. There is one on an invariant stream of a GPU of compute capability 9.0, for bf16.
bool matmul_leaves(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps, DType leaf,
                   std::span<const Tensor> nodes);

}  // namespace invar::ops
