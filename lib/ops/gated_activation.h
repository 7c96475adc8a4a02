#pragma once

#include "device/stream.h"

namespace invar::ops {

// kSilu: x·σ(x). kGeluTanh: x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), Hugging Face's gelu_pytorch_tanh.
enum class Activation : uint8_t { kSilu, kGeluTanh };

// gate_up (T, blocks · 2 · width): rows hold FFN blocks one after another, each [gate of width, up of width].
// out (T, blocks · width) = act(gate) · up, in fp32, rounded once.
void gated_activation_forward(const Stream& stream, Activation activation, const Tensor& gate_up, int64_t width,
                              const Tensor& out);
// d_gate_up may be gate_up's own buffer. `out`, if defined, gets what forward gives.
void gated_activation_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate_up,
                               int64_t width, const Tensor& d_gate_up, const Tensor& out = {});

// out = act(gate) · value, all (T, width), in fp32, rounded once.
void gate_forward(const Stream& stream, Activation activation, const Tensor& gate, const Tensor& value,
                  const Tensor& out);
// d_gate = d_out · value · act'(gate), d_value = d_out · act(gate). d_gate may be gate's own buffer.
void gate_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate,
                   const Tensor& value, const Tensor& d_gate, const Tensor& d_value);

}  // namespace invar::ops
