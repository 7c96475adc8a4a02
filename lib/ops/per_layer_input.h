#pragma once

#include <span>

#include "core/range.h"
#include "device/stream.h"

namespace invar::ops {

// The per-layer inputs of Gemma 4 (E2B, E4B): for layer l and token t, of width P,
//   input(l, t) = (c · rstd · weight + e) / √2,  c = scale · projected,  rstd = (mean_P(c²) + eps)^(-1/2),
// with `projected` from the token's embedding and e looked up. A rank holds w of the P columns of every layer, so the
// two sums over P are made in two calls, between which the caller adds over ranks. fp32 inside, one rounding.
struct PerLayerInputParams {
  int64_t layers = 0;
  int64_t width = 0;   // P
  float scale = 1.0f;  // hidden_size^(-1/2)
  float eps = 1e-6f;
};

// The operands that forward and backward share; tensors of one floating dtype unless said otherwise.
struct PerLayerProjection {
  Tensor projected;  // (T, L · w), layers one after another in a row
  Tensor squares;    // f32 (T, L), Σ over all P columns of c²
  Tensor weight;     // (w)
};

// squares f32 (T, L) = this rank's terms, written. With leaves, which cut the w columns in ascending order and leave
// none out, f32 (leaves, T, L): squares[j] = the terms of leaf j, in an order that depends on the leaf's width alone.
void per_layer_squares(const Stream& stream, const PerLayerInputParams& params, const Tensor& projected,
                       const Tensor& squares, std::span<const Range> leaves = {});
// looked_up (T, L · w) -> inputs (L · T, w): the tokens of layer 0, then those of layer 1, ...
void per_layer_input_forward(const Stream& stream, const PerLayerInputParams& params,
                             const PerLayerProjection& projection, const Tensor& looked_up, const Tensor& inputs);

// With u = c · rstd, g = d_input · weight / √2: dots f32 (T, L) = this rank's terms of Σ_P g · u, written; with leaves
// (leaves, T, L), as squares.
void per_layer_dots(const Stream& stream, const PerLayerInputParams& params, const PerLayerProjection& projection,
                    const Tensor& d_inputs, const Tensor& dots, std::span<const Range> leaves = {});
// From the complete dots: d_projected (T, L · w) = scale · rstd · (g − u · dots / P), d_looked_up (T, L · w) =
// d_input / √2, both written; d_weight f32 (w) or (blocks, w), where the tokens are `blocks` equal runs: d_weight[b] +=
// Σ d_input / √2 · u over the tokens of run b and, within a token, layers, ascending. (w) is one block. The bits of an
// element of d_weight[b] depend on its column and its run's tokens alone, not on w or T. d_projected may be projected's
// own buffer. Error{kFault} if blocks does not divide the tokens.
void per_layer_input_backward(const Stream& stream, const PerLayerInputParams& params,
                              const PerLayerProjection& projection, const Tensor& d_inputs, const Tensor& dots,
                              const Tensor& d_projected, const Tensor& d_looked_up, const Tensor& d_weight);

}  // namespace invar::ops
