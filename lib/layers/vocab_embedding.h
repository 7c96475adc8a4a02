#pragma once

#include "layers/layer_context.h"
#include "ops/embedding.h"

namespace invar {

// A (V, C) table cut over the tensor-parallel group in runs of vocabulary rows; padded rows belong to no parameter.
struct VocabTable {
  WeightId weight = 0;
  Range rows;              // padded token ids of this rank
  int64_t vocab_size = 0;  // real ids; those from here on are padding
  int64_t widest = 0;      // rows of the rank that holds most
  CutDim dim;              // the rows
};
// Random initial weights leave the row of frozen_token (−1: none) at zero.
VocabTable add_vocab_table(const LayerSetup& setup, const std::string& name, int64_t vocab_size, int64_t hidden_size,
                           int64_t frozen_token = -1);

// Token embedding. Each rank looks up the rows that it holds; the others' are zero, so the sum over ranks is exact.
class VocabEmbedding {
 public:
  // use: of the table's weight.
  VocabEmbedding(const VocabTable& table, const WeightUse& use, const ops::LookupParams& lookup)
      : table_(table), use_(use), lookup_(lookup) {}

  // tokens i32 (T) -> h (local, C), written to h.
  void forward(const LayerContext& ctx, const Tensor& tokens, const Tensor& h) const;
  void backward(const LayerContext& ctx, const Tensor& tokens, const Tensor& d_h) const;

 private:
  VocabTable table_;
  WeightUse use_;
  ops::LookupParams lookup_;
};

}  // namespace invar
