#pragma once

#include <span>

#include "core/exact_sum.h"
#include "device/stream.h"
#include "ops/head_view.h"

namespace invar::ops {

void zero(const Stream& stream, const Tensor& x);
// Same shape, any pair of f32 and bf16.
void copy(const Stream& stream, const Tensor& from, const Tensor& to);
// The same heads of one dtype, f32 or bf16, in another place.
void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to);
// out = a + b in fp32, rounded once. Any mix of f32 and bf16; out may be a or b.
void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
// out = max(a, b), f32 all; out may be a or b.
void maximum(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
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
// Neighbouring rows of a flat tensor, from one element on.
struct RowBlock {
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t columns = 0;

  int64_t end() const { return begin + rows * columns; }
};
// out[r] = Σ x² over row r, counted through the blocks in turn, in fp64 and in an order that depends on the row's
// number of columns alone, on the CPU that of a sum above. x f32 (n), out f64 (all rows), written.
void row_squares(const Stream& stream, const Tensor& x, std::span<const RowBlock> blocks, const Tensor& out);

// digits i64 (ExactSum::kDigits) = digits of the exact sum of x, f64 (n): the same number on every device, though not
// always by the same digits.
void exact_sum(const Stream& stream, const Tensor& x, const Tensor& digits);

}  // namespace invar::ops
