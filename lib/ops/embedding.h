#pragma once

#include "core/range.h"
#include "device/stream.h"

namespace invar::ops {

// What a lookup multiplies by, and the token whose row it does not train.
struct LookupParams {
  float scale = 1.0f;
  int64_t frozen_token = -1;  // Hugging Face's padding_idx; −1: none
};

// tokens i32 (T); table (rows, C) holds vocabulary rows [vocabulary.begin, vocabulary.end).
// out (T, C) = scale · table row of the token, or +0 where the row is on another rank. −0 is written as +0, so that a
// sum over ranks has the bits of a plain lookup.
void embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& table,
                       Range vocabulary, const Tensor& out);
// d_table f32 (rows, C) += scale · rows of d_out, tokens ascending; the frozen token's row gets nothing.
void embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                        Range vocabulary, const Tensor& d_table);

// The same with a table of V rows cut by columns, in blocks of `block` that lie one after another: table
// (blocks, V · block), element (j, v · block + c) being column j · block + c of row v. out (T, blocks · block).
void column_embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                              const Tensor& table, int64_t block, const Tensor& out);
void column_embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                               const Tensor& d_out, int64_t block, const Tensor& d_table);

}  // namespace invar::ops
