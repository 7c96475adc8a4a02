#include "layers/linear.h"

namespace invar {

using ops::Transpose;

Tensor ColumnParallelLinear::forward(const LayerContext& ctx, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor x_all = ctx.region.gather(ctx.stream, ctx.keep ? ctx.saved : ctx.scratch, x);
  const HeldWeight weight = ctx.forward_weight(weight_);
  ctx.sums.multiply(ctx.stream, x_all, Transpose::kNo, weight.value(), Transpose::kYes, y);
  return ctx.keep ? x_all : x;
}

Tensor ColumnParallelLinear::backward(const LayerContext& ctx, const Tensor& x, const Tensor& d_y) const {
  const auto d_x = ctx.sums.product(ctx, out_, x.dim(1));
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.keep ? x : ctx.region.gather(ctx.stream, ctx.scratch, x);
    d_x->multiply(d_y, ctx.backward_weight(weight_).value());
    ctx.gradients.add_product(ctx, weight_, {0, ctx.region.tokens()}, d_y, x_all);
    ctx.gradients.done(weight_);
  }
  return d_x->sum();
}

Tensor RowParallelLinear::forward(const LayerContext& ctx, const Tensor& x) const {
  std::unique_ptr<CutProduct> y;
  {
    const HeldWeight weight = ctx.forward_weight(weight_);
    y = ctx.sums.product(ctx, in_, weight.value().dim(1));
    y->multiply(x, weight.value());
  }
  return y->sum();
}

void RowParallelLinear::backward(const LayerContext& ctx, const std::function<Tensor()>& x, const Tensor& d_y,
                                 const Tensor& d_x) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor d_y_all = ctx.region.gather(ctx.stream, ctx.scratch, d_y);
  ctx.sums.multiply(ctx.stream, d_y_all, Transpose::kNo, ctx.backward_weight(weight_).value(), Transpose::kYes, d_x);
  const Tensor input = x();
  ctx.gradients.add_product(ctx, weight_, {0, ctx.region.tokens()}, input, d_y_all);
  ctx.gradients.done(weight_);
}

}  // namespace invar
