#include "layers/rms_norm.h"

namespace invar {

WeightId add_replicated_vector(ParameterTable& table, const ReplicaGroups& replicas, const std::string& name,
                               int64_t size, bool partial_gradient, VectorTerms terms) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = {size};
  parameter.init = Init::kOnes;
  parameter.runs = {{{0, size}, 0}};
  parameter.replicas = replicas.tensor();
  parameter.partial_gradient = partial_gradient && !table.fixed_order();
  Weight weight;
  weight.name = name;
  weight.rows = size;
  weight.cols = 1;
  weight.decay = false;
  weight.parameters = {std::move(parameter)};
  if (table.fixed_order()) weight.terms = std::move(terms);
  return table.add(std::move(weight));
}

RmsNorm::RmsNorm(ParameterTable& table, const ReplicaGroups& replicas, const std::string& name, int64_t size,
                 double eps, bool sequence_parallel)
    : weight_(add_replicated_vector(table, replicas, name, size, sequence_parallel, {VectorTerms::Of::kBlocks})),
      eps_(static_cast<float>(eps)) {}

void RmsNorm::forward(const LayerContext& ctx, const Tensor& x, const Tensor& y, const Tensor& rstd) const {
  ops::rms_norm_forward(ctx.stream, x, ctx.weights.acquire_forward(weight_), eps_, y, rstd);
}

void RmsNorm::add_forward(const LayerContext& ctx, const Tensor& a, const Tensor& b, const Tensor& x, const Tensor& y,
                          const Tensor& rstd) const {
  ops::add_rms_norm_forward(ctx.stream, a, b, ctx.weights.acquire_forward(weight_), eps_, x, y, rstd);
}

void RmsNorm::backward(const LayerContext& ctx, const Tensor& d_y, const Tensor& x, const Tensor& rstd,
                       ops::Write write, const Tensor& d_x) const {
  ops::rms_norm_backward(ctx.stream, d_y, x, ctx.weights.acquire_backward(weight_), rstd, write, d_x,
                         ctx.weights.vector_gradient(weight_));
  ctx.weights.gradient_done(weight_);
}

}  // namespace invar
