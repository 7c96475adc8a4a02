#include "like_cpu.h"
#include "ops/gated_activation.h"

namespace invar::ops {
namespace {

using namespace invar::test;

struct Shape {
  int64_t tokens, blocks, width;
};

TEST_CASE("gated_activation on the GPU is the CPU's") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const auto [tokens, blocks, width] = GENERATE(values<Shape>({{0, 4, 32},
                                                               {1, 1, 1},
                                                               {3, 2, 7},
                                                               {5, 3, 8},
                                                               {2, 3, 12},
                                                               {7, 5, 16},
                                                               {64, 96, 32},
                                                               {1000, 96, 32},
                                                               {9, 1, 515}}));
  const HostTensor gate_up = random_tensor(dtype, {tokens, blocks * 2 * width}, 1, 8.0);
  const HostTensor d_out = random_tensor(dtype, {tokens, blocks * width}, 2);
  HostTensor out(dtype, {tokens, blocks * width}), d_gate_up(dtype, {tokens, blocks * 2 * width});
  const DeviceTensor device_gate_up(gate_up), device_d_out(d_out), device_out(out), device_d_gate_up(d_gate_up);

  gated_activation_forward(kCpu, activation, gate_up, width, out);
  gated_activation_forward(gpu(), activation, device_gate_up, width, device_out);
  require_like_cpu(device_out.host(), out);

  gated_activation_backward(kCpu, activation, d_out, gate_up, width, d_gate_up);
  gated_activation_backward(gpu(), activation, device_d_out, device_gate_up, width, device_d_gate_up);
  require_like_cpu(device_d_gate_up.host(), d_gate_up);

  const DeviceTensor again(HostTensor(dtype, {out.tensor().dim(0), out.tensor().dim(1)}));
  gated_activation_backward(gpu(), activation, device_d_out, device_gate_up, width, device_gate_up, again);
  CHECK(device_gate_up.host().same_bits(device_d_gate_up.host()));
  CHECK(again.host().same_bits(device_out.host()));
}

TEST_CASE("gate on the GPU is the CPU's") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const int64_t tokens = GENERATE(0, 1, 3, 777), width = GENERATE(1, 7, 16, 256);
  const HostTensor gate = random_tensor(dtype, {tokens, width}, 1, 8.0);
  const HostTensor value = random_tensor(dtype, {tokens, width}, 2, 3.0);
  const HostTensor d_out = random_tensor(dtype, {tokens, width}, 3);
  HostTensor out(dtype, {tokens, width}), d_gate = out, d_value = out;
  const DeviceTensor device_gate(gate), device_value(value), device_d_out(d_out);
  const DeviceTensor device_out(out), device_d_gate(d_gate), device_d_value(d_value);

  gate_forward(kCpu, activation, gate, value, out);
  gate_forward(gpu(), activation, device_gate, device_value, device_out);
  require_like_cpu(device_out.host(), out);

  gate_backward(kCpu, activation, d_out, gate, value, d_gate, d_value);
  gate_backward(gpu(), activation, device_d_out, device_gate, device_value, device_d_gate, device_d_value);
  require_like_cpu(device_d_gate.host(), d_gate);
  require_like_cpu(device_d_value.host(), d_value);

  gate_backward(gpu(), activation, device_d_out, device_gate, device_value, device_gate, device_d_value);
  CHECK(device_gate.host().same_bits(device_d_gate.host()));
}

TEST_CASE("an activation on the GPU saturates without a NaN") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const HostTensor gate(dtype, {1, 6}, {-1e4, -100, -20, 20, 100, 1e4}), ones(dtype, {1, 6}, Values(6, 1.0));
  const DeviceTensor device_gate(gate), device_ones(ones), out(ones), d_gate(ones), d_value(ones);
  gate_forward(gpu(), activation, device_gate, device_ones, out);
  gate_backward(gpu(), activation, device_ones, device_gate, device_ones, d_gate, d_value);
  const Values x = gate.values();
  require_close(out.host().values(), {0, 0, 0, x[3], x[4], x[5]}, 0, 1e-6);
  require_close(d_value.host().values(), {0, 0, 0, x[3], x[4], x[5]}, 0, 1e-6);
  require_close(d_gate.host().values(), {0, 0, 0, 1, 1, 1}, 0, 1e-6);
}

}  // namespace
}  // namespace invar::ops
