#pragma once

#include <span>

#include "core/range.h"
#include "core/tensor.h"
#include "device/stream.h"
#include "ops/numerics.h"

namespace invar::ops {

enum class Transpose : bool { kNo = false, kYes = true };

// c (M, N) = op(a) (M, K) · op(b) (K, N) + beta · c.
//
// a and b are 2-D of equal dtype (f32 or bf16), c is f32 or bf16; products and sums are fp32, rounded once to c's
// dtype. beta is 0 (c may be uninitialised) or 1 (c must be f32: gradient accumulation, RN32(sum + c)).
// Bits: on the CPU every element of c is one fp32 chain of fused multiply-adds over ascending k, so it does not depend
// on M, N, the position of the element, or the number of threads. On a GPU in fast numerics bits are equal from run to
// run, and the order of a sum depends on sizes and layouts. In invariant numerics it does not: f32 sums are those of
// the CPU; bf16 sums are one chain of tensor core steps of 16 over ascending k (ops/cuda/matmul_chain.h), by algorithms
// of cuBLASLt that were proved to give it, or by a slower kernel of our own where there is none.
void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta = 0.0f, const Numerics& numerics = {});

// c (M, N) = op(a[:, columns]) · b (K, N) + beta · c, where the columns are K or, transposed, M: the rules of matmul()
// of a copy of these columns, and its bits on the CPU and in invariant numerics.
void matmul_columns(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
                    const Tensor& c, float beta = 0.0f, const Numerics& numerics = {});

// terms (S, M, N) f32: terms[s] = aᵀ · b of the tokens of sample s, where a (T, ·), of which only `columns` (M) are
// there, and b (T, N) have S samples of T / S tokens, one after another: the rules of matmul_columns(), transposed. On
// the CPU and in invariant numerics it has the bits that matmul_columns() gives each sample.
void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms,
                    const Numerics& numerics = {});

// A step of a sum over leaves of k, which has a stack of sums: the product over `columns` of a goes to `buffer`, a new
// one or the last (then it is added to what is there), and `joins` times the last sum is added to the one below.
struct LeafStep {
  Range columns;
  int buffer = 0;
  bool accumulate = false;
  int joins = 0;
};
// Where a sum over leaves is computed.
struct LeafSpace {
  std::span<const Tensor> buffers;  // the stack: (M, N) each, f32, of a single leaf also bf16
  Tensor rounded;                   // (M, N) bf16: leaves pass through it and are rounded; undefined: they are not
};

// buffers[i] = what the steps leave of a (M, K) · b, where a leaf's rows of b (K, N) are those of its columns of a.
// Each leaf is the product of matmul_columns() in invariant numerics, each join one addition in fp32.
void matmul_leaf_by_leaf(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps,
                         const LeafSpace& space, const Numerics& numerics);

// nodes[i] (M, N) = the same, f32, or bf16 where sums are rounded once. By one kernel where it is faster (bf16 on a GPU
// of compute capability 9.0), with the same bits, else leaf by leaf. The first nodes may be the first buffers.
void matmul_leaves(const Stream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps,
                   const LeafSpace& space, std::span<const Tensor> nodes, const Numerics& numerics);

}  // namespace invar::ops
