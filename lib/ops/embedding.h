#pragma once

#include "core/range.h"
#include "device/stream.h"
#include "ops/sample_sums.h"

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
// The gradient of a table f32 (rows, C), as above, from d_out (T, C): to a row are added scale · d_out of its tokens,
// ascending, each by one fma; the frozen token's gets nothing. sums: of one sample, or of several of T / samples tokens
// each, whose buffers are such tables. A row that no token looks up stays as it is in every buffer; of others, what is
// left in a buffer that was joined is undefined. Samples, but for a single one that is added to one sum, need a scale
// of 1 or more: then no product rounds to zero, so that no sum that began at +0 is −0, and rows without tokens have the
// bits that added zeros would give. Error{kFault} for other shapes, places, buffers or scales.
void embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                        Range vocabulary, const SampleSums& sums);

// The same with a table of V rows cut by columns, in blocks of `block` that lie one after another: table
// (blocks, V · block), element (j, v · block + c) being column j · block + c of row v. out (T, blocks · block).
void column_embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                              const Tensor& table, int64_t block, const Tensor& out);
void column_embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                               const Tensor& d_out, int64_t block, const SampleSums& sums);

}  // namespace invar::ops
