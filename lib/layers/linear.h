#pragma once

#include <functional>

#include "layers/layer_context.h"

namespace invar {

// y = x Wᵀ with the out-features cut over the tensor-parallel group. W is stored (out, in). In a group of one this is
// the plain linear.
class ColumnParallelLinear {
 public:
  // out: the cut dim.
  ColumnParallelLinear(WeightId weight, CutDim out) : weight_(weight), out_(std::move(out)) {}

  // x (local, in) -> y (T, out of this rank), written to y. Returns the input for backward: x, or with ctx.keep x of
  // all tokens, which if it is not x itself is saved.
  Tensor forward(const LayerContext& ctx, const Tensor& x, const Tensor& y) const;
  // Adds the weight's gradient; returns d_x (local, in). x: what forward returned.
  Tensor backward(const LayerContext& ctx, const Tensor& x, const Tensor& d_y) const;

 private:
  WeightId weight_;
  CutDim out_;
};

// y = x Wᵀ with the in-features cut over the group. W is stored transposed, (in, out): unit-major.
class RowParallelLinear {
 public:
  // in: the cut dim.
  RowParallelLinear(WeightId weight, CutDim in) : weight_(weight), in_(std::move(in)) {}

  // x (T, in of this rank) -> (local, out).
  Tensor forward(const LayerContext& ctx, const Tensor& x) const;
  // d_y (local, out) -> d_x (T, in of this rank), written to d_x. Then adds the weight's gradient, for which x() gives
  // the input of forward: what made it may do its own backward on the way.
  void backward(const LayerContext& ctx, const std::function<Tensor()>& x, const Tensor& d_y, const Tensor& d_x) const;

 private:
  WeightId weight_;
  CutDim in_;
};

}  // namespace invar
