#pragma once

#include "layers/linear.h"
#include "ops/embedding.h"
#include "ops/gated_activation.h"
#include "ops/per_layer_input.h"

namespace invar {

// Per-layer embeddings (Gemma 4 E2B and E4B): a second table gives every token a vector of width P for every layer.
struct PerLayerEmbeddingSpec {
  std::string table;       // (V, L · P); empty: the model has none
  std::string projection;  // (L · P, C)
  std::string norm;        // (P)
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t layers = 0;
  int64_t width = 0;  // P
  int64_t block = 1;  // columns of P per unit
  double norm_eps = 1e-6;
  double scale = 1.0;  // of the lookup
  int64_t frozen_token = -1;
};

// inputs(l) = (norm(C^(-1/2) · project(x)) + scale · lookup) / √2 for all layers at once. Tensor-parallel over P:
// table, projection and norm are cut, and only the norm's mean over P crosses ranks.
class PerLayerEmbedding {
 public:
  struct Saved {
    Tensor x;          // (T, C) with ctx.keep: the input of all tokens
    Tensor projected;  // (T, L · w), w columns of P on this rank
    Tensor squares;    // f32 (T, L), over all P columns
    Tensor inputs;     // (L · T, w)
    Tensor d_inputs;   // the same; layers write their own part in backward
  };

  PerLayerEmbedding(const LayerSetup& setup, const PerLayerEmbeddingSpec& spec);

  // tokens i32 (T), x (local, C) the embedded tokens. Fills saved; d_inputs only if with_gradient.
  void forward(const LayerContext& ctx, const Tensor& tokens, const Tensor& x, bool with_gradient, Saved& saved) const;
  // Adds the gradient of x to d_x (local, C). Uses saved up.
  void backward(const LayerContext& ctx, const Tensor& tokens, const Tensor& x, Saved& saved, const Tensor& d_x) const;

  // A layer's part (T, w) of inputs or d_inputs.
  static Tensor of_layer(const LayerContext& ctx, const Tensor& inputs, int64_t layer);

 private:
  PerLayerEmbeddingSpec spec_;
  UnitCut cut_;
  CutDim columns_;  // P
  ops::LookupParams lookup_;
  ops::PerLayerInputParams params_;
  WeightId table_;
  ColumnParallelLinear projection_;
  WeightId norm_;
};

struct PerLayerGateSpec {
  std::string gate;        // (P, C)
  std::string projection;  // (C, P)
  int64_t hidden_size = 0;
  int64_t width = 0;  // P
  int64_t block = 1;
  ops::Activation activation = ops::Activation::kGeluTanh;
};

// y = project(act(gate h) · input), where a layer takes its per-layer input. Tensor-parallel over P.
class PerLayerGate {
 public:
  struct Saved {
    Tensor h;     // (T, C) with ctx.keep: the input of all tokens
    Tensor gate;  // (T, w)
  };

  PerLayerGate(const LayerSetup& setup, const PerLayerGateSpec& spec);

  // h (local, C), input (T, w) -> (local, C).
  Tensor forward(const LayerContext& ctx, const Tensor& h, const Tensor& input, Saved& saved) const;
  // d_y (local, C) -> d_h (local, C); d_input (T, w) is written. Uses saved up.
  Tensor backward(const LayerContext& ctx, const Tensor& h, const Tensor& input, Saved& saved, const Tensor& d_y,
                  const Tensor& d_input) const;

 private:
  Tensor gated(const LayerContext& ctx, const Tensor& input, const Saved& saved) const;

  PerLayerGateSpec spec_;
  UnitCut cut_;
  ColumnParallelLinear gate_;
  RowParallelLinear projection_;
};

}  // namespace invar
