#pragma once

#include "device/stream.h"

namespace invar::ops {

void zero(const Stream& stream, const Tensor& x);
// Same shape, any pair of f32 and bf16.
void copy(const Stream& stream, const Tensor& from, const Tensor& to);
// out = a + b in fp32, rounded once. Any mix of f32 and bf16; out may be a or b.
void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
// x = x · factor[0], in place, rounded once. factor (1) of x's dtype.
void scale_by(const Stream& stream, const Tensor& factor, const Tensor& x);

// Both sums run over an f32 tensor in fp64, in an order that depends on its size alone, never on threads. In a block of
// kSumBlock elements, lane l of 16 is the chain of elements l, l + 16, l + 32, ...; lanes are joined by halving, l with
// l + 8 first; the sums of the blocks are joined in ascending order. Meta gives 0.
inline constexpr int64_t kSumBlock = 16384;
// Σ x²
double sum_of_squares(const Stream& stream, const Tensor& x);
// Σ x
double sum(const Stream& stream, const Tensor& x);

}  // namespace invar::ops
