#include "layers/linear.h"

#include "layers/group_product.h"
#include "ops/matmul.h"

namespace invar {

using ops::matmul;
using ops::Transpose;

Tensor ColumnParallelLinear::forward(const LayerContext& ctx, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor x_all = ctx.region.gather(ctx.stream, ctx.keep ? ctx.saved : ctx.scratch, x);
  matmul(ctx.stream, x_all, Transpose::kNo, ctx.weights.acquire_forward(weight_), Transpose::kYes, y);
  return ctx.keep ? x_all : x;
}

Tensor ColumnParallelLinear::backward(const LayerContext& ctx, const Tensor& x, const Tensor& d_y) const {
  GroupProduct d_x(ctx, ctx.weights.leaves(weight_), x.dim(1));
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.keep ? x : ctx.region.gather(ctx.stream, ctx.scratch, x);
    d_x.multiply(d_y, ctx.weights.acquire_backward(weight_));
    ctx.weights.accumulate_product(ctx.stream, ctx.scratch, weight_, {0, ctx.region.tokens()}, d_y, x_all);
    ctx.weights.gradient_done(weight_);
  }
  return d_x.sum();
}

Tensor RowParallelLinear::forward(const LayerContext& ctx, const Tensor& x) const {
  const Tensor weight = ctx.weights.acquire_forward(weight_);
  GroupProduct y(ctx, ctx.weights.leaves(weight_), weight.dim(1));
  y.multiply(x, weight);
  return y.sum();
}

void RowParallelLinear::backward(const LayerContext& ctx, const std::function<Tensor()>& x, const Tensor& d_y,
                                 const Tensor& d_x) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor d_y_all = ctx.region.gather(ctx.stream, ctx.scratch, d_y);
  matmul(ctx.stream, d_y_all, Transpose::kNo, ctx.weights.acquire_backward(weight_), Transpose::kYes, d_x);
  const Tensor input = x();
  ctx.weights.accumulate_product(ctx.stream, ctx.scratch, weight_, {0, ctx.region.tokens()}, input, d_y_all);
  ctx.weights.gradient_done(weight_);
}

}  // namespace invar
