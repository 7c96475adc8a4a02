#pragma once

#include <span>

#include "layers/layer_context.h"

namespace invar {

// The product a · w over a dim K that the tensor-parallel group has cut: a (T, K of this rank), w (K of this rank, N),
// a weight's rows, and the sum over the ranks. In fixed order the leaves of K are added by the tree, each rounded to
// region.leaf_dtype() before, unless they are never alone on a rank.
class GroupProduct {
 public:
  // Its terms take their place on scratch, and so does the sum. leaves: of the weight; null: any order.
  GroupProduct(const LayerContext& ctx, const LeafCut* leaves, int64_t columns);

  void multiply(const Tensor& a, const Tensor& w);
  // Rows [first, first + n) of the product, from those (n, K of this rank) of `a`.
  void multiply_rows(int64_t first, const Tensor& a, const Tensor& w) const;
  // (local, N) of the activation dtype, on scratch or a part of a term.
  Tensor sum() const;

 private:
  DType leaf_dtype() const;

  const LayerContext& ctx_;
  const LeafCut* leaves_;
  Tensor root_;                // (T, N) of the activation dtype: of leaves that are all on this rank
  std::vector<Tensor> terms_;  // (T, N): of a rank's sum, or its nodes
  bool root_made_ = false;
};

// out f32 (A) = the sum over all ranks' leaves, f32 (A) each, of which these are this rank's; they are overwritten.
void sum_leaves(const LayerContext& ctx, const LeafCut& cut, std::span<const Tensor> leaves, const Tensor& out);

}  // namespace invar
