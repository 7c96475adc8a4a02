#pragma once

#include "core/range.h"
#include "core/tensor.h"
#include "device/stream.h"

// Matrix products in the fixed order of invariant numerics.
namespace invar::ops::cuda {

// c (m, n) = op(a) (m, k) · op(b) (k, n), plus c if `accumulate` (c is then f32). Of the columns of a as stored only
// `columns` are there. Not empty.
struct OrderedProduct {
  Tensor a;
  Range columns;
  bool transpose_a = false;
  Tensor b;
  bool transpose_b = false;
  Tensor c;
  bool accumulate = false;

  int64_t m() const { return c.dim(0); }
  int64_t n() const { return c.dim(1); }
  int64_t k() const { return b.dim(transpose_b ? 1 : 0); }
};

// c from a and b in f32, with the bits of cpu::gemm: each element is a chain of fused multiply-adds from zero over
// ascending k; then RN32(sum + c) if `accumulate`; then rounded once to c's dtype.
void multiply_f32_in_order(CudaStream& stream, const OrderedProduct& product);

// Of a and b in bf16. The order is that of tensor cores: from zero, steps of 16 over ascending k (the last one filled
// up with zeros), each an mma.sync m16n8k16 on fp32 sums; then RN32(sum + c) if `accumulate`; then rounded once to c's
// dtype.
//
// By mma.sync itself, where cuBLASLt has no algorithm that keeps the order: not fast.
void multiply_bf16_in_order(CudaStream& stream, const OrderedProduct& product);

// Fills a and b, and c if `accumulate`, with values that show another order: exponents are spread over 2^-7 to 2^7, and
// in every second row of c the terms cancel, so that only what was rounded away is left. Other a and b for each sample.
void fill_for_comparison(CudaStream& stream, const OrderedProduct& product, uint64_t sample = 0);
// How many elements of c, which some algorithm made of what fill_for_comparison() wrote, have not the bits of the
// order. All are compared if c has at most 4096 tiles of 64 x 64, and otherwise 4096 tiles spread over c, with the
// first and the last. Returns when that is done.
int64_t count_out_of_order(CudaStream& stream, const OrderedProduct& product);

}  // namespace invar::ops::cuda
