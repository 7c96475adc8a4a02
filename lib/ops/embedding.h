#pragma once

#include "core/range.h"
#include "device/stream.h"

namespace invar::ops {

// tokens i32 (T); table (rows, C) holds vocabulary rows [vocabulary.begin, vocabulary.end).
// out (T, C) = table row of the token, or +0 where the row is on another rank. −0 is written as +0, so that a sum over
// ranks has the bits of a plain lookup.
void embedding_forward(const Stream& stream, const Tensor& tokens, const Tensor& table, Range vocabulary,
                       const Tensor& out);
// d_table f32 (rows, C) += rows of d_out, tokens ascending.
void embedding_backward(const Stream& stream, const Tensor& tokens, const Tensor& d_out, Range vocabulary,
                        const Tensor& d_table);

}  // namespace invar::ops
