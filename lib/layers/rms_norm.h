#pragma once

#include "layers/layer_context.h"
#include "ops/norm.h"
#include "parallel/replica_groups.h"

namespace invar {

// RMSNorm over the hidden dim of local tokens. Its weight is whole on every rank; under sequence parallelism each rank
// sees its own tokens only, so the gradients are terms of a sum over the tensor group.
class RmsNorm {
 public:
  RmsNorm(ParameterTable& table, const ReplicaGroups& replicas, const std::string& name, int64_t size, double eps,
          bool sequence_parallel);

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

// A one-dim weight that every rank of the tensor group holds whole. partial_gradient: each rank adds the terms that it
// sees. In fixed order these are `terms`, and every rank gets them all.
WeightId add_replicated_vector(ParameterTable& table, const ReplicaGroups& replicas, const std::string& name,
                               int64_t size, bool partial_gradient, VectorTerms terms);

}  // namespace invar
