#include "layers/rms_norm.h"

namespace invar {

WeightId add_replicated_vector(const LayerSetup& setup, const std::string& name, int64_t size, bool in_parts,
                               VectorSum sum) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = {size};
  parameter.init = Init::kOnes;
  parameter.runs = {{{0, size}, 0}};
  setup.sums.set_copies(parameter, setup.tensor(), in_parts);
  Weight weight;
  weight.name = name;
  weight.rows = size;
  weight.cols = 1;
  weight.decay = false;
  weight.vector = std::move(sum);
  weight.parameters = {std::move(parameter)};
  return setup.table.add(std::move(weight));
}

RmsNorm::RmsNorm(const LayerSetup& setup, const std::string& name, int64_t size, double eps)
    : weight_(add_replicated_vector(setup, name, size, setup.sequence_parallel, {VectorSum::Over::kTokens})),
      eps_(static_cast<float>(eps)) {}

void RmsNorm::forward(const LayerContext& ctx, const Tensor& x, const Tensor& y, const Tensor& rstd) const {
  ops::rms_norm_forward(ctx.stream, x, ctx.forward_weight(weight_).value(), eps_, y, rstd);
}

void RmsNorm::add_forward(const LayerContext& ctx, const Tensor& a, const Tensor& b, const Tensor& x, const Tensor& y,
                          const Tensor& rstd) const {
  ops::add_rms_norm_forward(ctx.stream, a, b, ctx.forward_weight(weight_).value(), eps_, x, y, rstd);
}

void RmsNorm::backward(const LayerContext& ctx, const Tensor& d_y, const Tensor& x, const Tensor& rstd,
                       ops::Write write, const Tensor& d_x) const {
  ops::rms_norm_backward(ctx.stream, d_y, x, ctx.backward_weight(weight_).value(), rstd, write, d_x,
                         ctx.gradients.vector(weight_));
  ctx.gradients.done(weight_);
}

}  // namespace invar
