#pragma once

#include "layers/layer_context.h"
#include "ops/norm.h"

namespace invar {

// RMSNorm over the hidden dim of local tokens. Its weight is whole on every rank; under sequence parallelism each rank
// sees its own tokens only, so each has a part of the gradient.
class RmsNorm {
 public:
  RmsNorm(const LayerSetup& setup, const std::string& name, int64_t size, double eps);

  // x (local, C) -> y; rstd f32 (local) is kept for backward.
  void forward(const LayerContext& ctx, const Tensor& x, const Tensor& y, const Tensor& rstd) const;
  // The same of x = a + b, which is written too.
  void add_forward(const LayerContext& ctx, const Tensor& a, const Tensor& b, const Tensor& x, const Tensor& y,
                   const Tensor& rstd) const;
  // Written or added to d_x (local, C): with kAdd, d_x holds the gradient of the residual path on entry.
  void backward(const LayerContext& ctx, const Tensor& d_y, const Tensor& x, const Tensor& rstd, ops::Write write,
                const Tensor& d_x) const;

 private:
  WeightId weight_;
  float eps_;
};

// A one-dim weight that every rank of the tensor group holds whole. in_parts: each rank sees only a part of what its
// gradient is a sum over.
WeightId add_replicated_vector(const LayerSetup& setup, const std::string& name, int64_t size, bool in_parts,
                               VectorSum sum);

}  // namespace invar
