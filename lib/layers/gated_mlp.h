#pragma once

#include "layers/linear.h"
#include "ops/gated_activation.h"
#include "parallel/unit_partition.h"

namespace invar {

struct GatedMlpSpec {
  std::string prefix;  // "model.layers.3.mlp."
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t block_width = 1;  // FFN columns per unit
  ops::Activation activation = ops::Activation::kSilu;
};

// y = down(act(gate x) · up x), tensor-parallel over FFN blocks.
class GatedMlp {
 public:
  struct Saved {
    Tensor x;        // (T, C) with ctx.keep: the input of all tokens
    Tensor gate_up;  // (T, 2·F of this rank): per FFN block [gate, up]
  };

  GatedMlp(const LayerSetup& setup, const GatedMlpSpec& spec);

  // x (local, C) -> (local, C). With ctx.keep and without a gather x stays until backward.
  Tensor forward(const LayerContext& ctx, const Tensor& x, Saved& saved) const;
  // Fills saved without the down projection: recomputation.
  void forward_saved(const LayerContext& ctx, const Tensor& x, Saved& saved) const;
  // d_y (local, C) -> d_x (local, C). x as in forward, or with ctx.keep saved.x. Uses saved up: gate_up becomes its own
  // gradient.
  Tensor backward(const LayerContext& ctx, const Tensor& x, Saved& saved, const Tensor& d_y) const;

 private:
  Tensor activate(const LayerContext& ctx, const Saved& saved) const;

  GatedMlpSpec spec_;
  UnitCut cut_;
  ColumnParallelLinear gate_up_;
  RowParallelLinear down_;
};

}  // namespace invar
