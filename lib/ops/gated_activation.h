#pragma once

#include "device/stream.h"

namespace invar::ops {

enum class Activation : uint8_t { kSilu };

// gate_up (T, blocks · 2 · width): rows hold FFN blocks one after another, each [gate of width, up of width].
// out (T, blocks · width) = act(gate) · up, in fp32, rounded once.
void gated_activation_forward(const Stream& stream, Activation activation, const Tensor& gate_up, int64_t width,
                              const Tensor& out);
// d_gate_up may be gate_up's own buffer.
void gated_activation_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate_up,
                               int64_t width, const Tensor& d_gate_up);

}  // namespace invar::ops
