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

// Both add the sum over an f32 tensor to total f64 (1), in fp64 and in an order that depends on the tensor's size
// alone, never on threads. On the CPU: in a block of kSumBlock elements, lane l of 16 is the chain of elements l,
// l + 16, l + 32, ...; lanes are joined by halving, l with l + 8 first; the sums of the blocks are joined in ascending
// order.
inline constexpr int64_t kSumBlock = 16384;
// total += Σ x²
void add_sum_of_squares(const Stream& stream, const Tensor& x, const Tensor& total);
// total += Σ x
void add_sum(const Stream& stream, const Tensor& x, const Tensor& total);

}  // namespace invar::ops
