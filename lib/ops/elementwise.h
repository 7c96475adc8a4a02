#pragma once

#include "device/stream.h"

namespace invar::ops {

void zero(const Stream& stream, const Tensor& x);
// Same shape, any pair of f32 and bf16.
void copy(const Stream& stream, const Tensor& from, const Tensor& to);
// out = a + b in fp32, rounded once. Any mix of f32 and bf16; out may be a or b.
void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
void scale(const Stream& stream, const Tensor& x, float factor);
// Σ x² of an f32 tensor in fp64, elements ascending. Meta gives 0.
double sum_of_squares(const Stream& stream, const Tensor& x);
// Σ x of an f32 tensor in fp64, elements ascending. Meta gives 0.
double sum(const Stream& stream, const Tensor& x);

}  // namespace invar::ops
