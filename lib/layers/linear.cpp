#include "layers/linear.h"

#include "ops/matmul.h"

namespace invar {

using ops::matmul;
using ops::Transpose;

void ColumnParallelLinear::forward(const LayerContext& ctx, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor x_all = ctx.region.gather(ctx.stream, ctx.scratch, x);
  matmul(ctx.stream, x_all, Transpose::kNo, ctx.weights.acquire_forward(weight_), Transpose::kYes, y);
}

Tensor ColumnParallelLinear::backward(const LayerContext& ctx, const Tensor& x, const Tensor& d_y) const {
  const Tensor d_x =
      ctx.scratch.allocate("d_x partial", ctx.region.partial_dtype(ctx.activation), {ctx.region.tokens(), x.dim(1)});
  // Each exchange runs beside a product that does not need it.
  const Tensor x_all = ctx.region.gather_beside(ctx.stream, ctx.scratch, x);
  matmul(ctx.stream, d_y, Transpose::kNo, ctx.weights.acquire_backward(weight_), Transpose::kNo, d_x);
  ctx.region.join(ctx.stream);
  const Tensor sum = ctx.region.reduce_beside(ctx.stream, ctx.scratch, d_x, ctx.activation);
  matmul(ctx.stream, d_y, Transpose::kYes, x_all, Transpose::kNo, ctx.weights.gradient(weight_), 1.0f);
  ctx.region.join(ctx.stream);
  ctx.weights.gradient_done(weight_);
  return sum;
}

Tensor RowParallelLinear::forward(const LayerContext& ctx, const Tensor& x) const {
  const Tensor weight = ctx.weights.acquire_forward(weight_);
  const Tensor y =
      ctx.scratch.allocate("y partial", ctx.region.partial_dtype(ctx.activation), {x.dim(0), weight.dim(1)});
  matmul(ctx.stream, x, Transpose::kNo, weight, Transpose::kNo, y);
  return ctx.region.reduce(ctx.stream, ctx.scratch, y, ctx.activation);
}

void RowParallelLinear::backward(const LayerContext& ctx, const std::function<Tensor()>& x, const Tensor& d_y,
                                 const Tensor& d_x) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor d_y_all = ctx.region.gather(ctx.stream, ctx.scratch, d_y);
  matmul(ctx.stream, d_y_all, Transpose::kNo, ctx.weights.acquire_backward(weight_), Transpose::kYes, d_x);
  matmul(ctx.stream, x(), Transpose::kYes, d_y_all, Transpose::kNo, ctx.weights.gradient(weight_), 1.0f);
  ctx.weights.gradient_done(weight_);
}

}  // namespace invar
