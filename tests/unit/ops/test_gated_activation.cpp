#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/gated_activation.h"

namespace invar::ops {
namespace {

using namespace invar::test;

double act(Activation activation, double x) {
  if (activation == Activation::kSilu) return x / (1 + std::exp(-x));
  const double root = std::sqrt(2 / std::acos(-1.0));
  return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x)));
}

// out of one [gate, up] block after another.
Values reference(Activation activation, const Values& gate_up, size_t width) {
  Values out(gate_up.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t at = i / width * 2 * width + i % width;
    out[i] = act(activation, gate_up[at]) * gate_up[at + width];
  }
  return out;
}

TEST_CASE("gated_activation forward and backward are the formula and its derivative") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const int64_t blocks = GENERATE(1, 2), width = GENERATE(1, 7, 16, 37, 515), tokens = width > 100 ? 1 : 3;
  const HostTensor gate_up = random_tensor(dtype, {tokens, blocks * 2 * width}, 1, 6.0);
  const HostTensor d_out = random_tensor(dtype, {tokens, blocks * width}, 2);
  HostTensor out(dtype, {tokens, blocks * width}), d_gate_up(dtype, {tokens, blocks * 2 * width});

  gated_activation_forward(kCpu, activation, gate_up, width, out);
  require_rounded(out, reference(activation, gate_up.values(), static_cast<size_t>(width)));

  gated_activation_backward(kCpu, activation, d_out, gate_up, width, d_gate_up);
  const auto loss = [&](const Values& x) {
    return dot(reference(activation, x, static_cast<size_t>(width)), d_out.values());
  };
  require_rounded(d_gate_up, numeric_gradient(loss, gate_up.values()));

  HostTensor in_place = gate_up, again(dtype, {tokens, blocks * width});
  gated_activation_backward(kCpu, activation, d_out, in_place, width, in_place, again);
  CHECK(in_place.same_bits(d_gate_up));
  CHECK(again.same_bits(out));
}

TEST_CASE("gate forward and backward are the formula and its derivative") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const int64_t width = GENERATE(1, 7, 16, 515), tokens = 3;
  const HostTensor gate = random_tensor(dtype, {tokens, width}, 1, 6.0);
  const HostTensor value = random_tensor(dtype, {tokens, width}, 2, 3.0);
  const HostTensor d_out = random_tensor(dtype, {tokens, width}, 3);
  HostTensor out(dtype, {tokens, width}), d_gate = out, d_value = out;
  const auto formula = [&](const Values& g, const Values& v) {
    Values y(g.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = act(activation, g[i]) * v[i];
    return y;
  };
  const Values g = gate.values(), v = value.values(), d = d_out.values();

  gate_forward(kCpu, activation, gate, value, out);
  require_rounded(out, formula(g, v));

  gate_backward(kCpu, activation, d_out, gate, value, d_gate, d_value);
  require_rounded(d_gate, numeric_gradient([&](const Values& x) { return dot(formula(x, v), d); }, g));
  require_rounded(d_value, numeric_gradient([&](const Values& x) { return dot(formula(g, x), d); }, v));

  HostTensor in_place = gate, d_value_again = out;
  gate_backward(kCpu, activation, d_out, in_place, value, in_place, d_value_again);
  CHECK(in_place.same_bits(d_gate));
  CHECK(d_value_again.same_bits(d_value));
}

TEST_CASE("silu is finite and exact in its tails") {
  const HostTensor gate_up(DType::kF32, {6, 2}, {-1000, 1, -100, 1, -20, 1, 0, 1, 100, 1, 3e38, 1});
  const HostTensor d_out(DType::kF32, {6, 1}, Values(6, 1.0));
  HostTensor out(DType::kF32, {6, 1}), d_gate_up(DType::kF32, {6, 2});
  gated_activation_forward(kCpu, Activation::kSilu, gate_up, 1, out);
  gated_activation_backward(kCpu, Activation::kSilu, d_out, gate_up, 1, d_gate_up);
  const double e = std::exp(-20.0);
  require_close(out.values(), {0, 0, -20 * e / (1 + e), 0, 100, static_cast<double>(3e38f)}, 2e-6, 1e-35);
  require_close({d_gate_up[0], d_gate_up[2], d_gate_up[4], d_gate_up[6], d_gate_up[8], d_gate_up[10]},
                {0, 0, e / (1 + e) * (1 - 20 / (1 + e)), 0.5, 1, 1}, 4e-6, 1e-35);
}

TEST_CASE("gelu_tanh is the tanh form, finite and exact in its tails") {
  const Values x = {-1e12, -1000, -20, -5, -1, 0, 1, 20, 1e12};
  const auto n = static_cast<int64_t>(x.size());
  const HostTensor gate(DType::kF32, {n, 1}, x), ones(DType::kF32, {n, 1}, Values(x.size(), 1.0));
  HostTensor out(DType::kF32, {n, 1}), d_gate = out, d_value = out;
  gate_forward(kCpu, Activation::kGeluTanh, gate, ones, out);
  gate_backward(kCpu, Activation::kGeluTanh, ones, gate, ones, d_gate, d_value);
  // With σ = 1/(1 + e^(2u)) in place of (1 − tanh u)/2, which fp64 cancels at −5. The form with erf is 0.8413447 at 1.
  const double u = std::sqrt(2 / std::acos(-1.0)) * (5 + 0.044715 * 125), sigma = 1 / (1 + std::exp(2 * u));
  const double slope = std::sqrt(2 / std::acos(-1.0)) * (1 + 3 * 0.044715 * 25);
  const Values y = {0, 0, 0, -5 * sigma, -0.15880801, 0, 0.84119199, 20, 1e12f};
  require_close(out.values(), y, 1e-5, 1e-30);
  require_close({d_gate[0], d_gate[1], d_gate[2], d_gate[3], d_gate[5], d_gate[7], d_gate[8]},
                {0, 0, 0, sigma * (1 - 5 * (1 - sigma) * 2 * slope), 0.5, 1, 1}, 1e-5, 1e-30);
  CHECK(d_value.same_bits(out));
}

TEST_CASE("gated_activation gives the same bits on two threads") {
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const int64_t tokens = 33, blocks = 5, width = 201;
  REQUIRE(tokens * blocks * width >= 2 * cpu::kMinWorkPerThread);
  const HostTensor gate_up = random_tensor(DType::kBF16, {tokens, blocks * 2 * width}, 1, 3.0);
  const HostTensor d_out = random_tensor(DType::kBF16, {tokens, blocks * width}, 2);
  HostTensor one(DType::kBF16, {tokens, blocks * width}), two = one;
  gated_activation_forward(kCpu, activation, gate_up, width, one);
  gated_activation_forward(kTwoThreads, activation, gate_up, width, two);
  CHECK(two.same_bits(one));
  HostTensor d_one = gate_up, d_two = gate_up;
  gated_activation_backward(kCpu, activation, d_out, d_one, width, d_one);
  gated_activation_backward(kTwoThreads, activation, d_out, d_two, width, d_two);
  CHECK(d_two.same_bits(d_one));
}

TEST_CASE("gate gives the same bits on two threads, and those of gated_activation") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const int64_t tokens = 163, width = 203;
  REQUIRE(tokens * width >= 2 * cpu::kMinWorkPerThread);
  const HostTensor gate = random_tensor(dtype, {tokens, width}, 1, 3.0),
                   value = random_tensor(dtype, {tokens, width}, 2);
  const HostTensor d_out = random_tensor(dtype, {tokens, width}, 3);
  HostTensor one(dtype, {tokens, width}), two = one, d_gate_one = one, d_gate_two = one, d_value_one = one,
                                          d_value_two = one;
  gate_forward(kCpu, activation, gate, value, one);
  gate_forward(kTwoThreads, activation, gate, value, two);
  gate_backward(kCpu, activation, d_out, gate, value, d_gate_one, d_value_one);
  gate_backward(kTwoThreads, activation, d_out, gate, value, d_gate_two, d_value_two);
  CHECK(two.same_bits(one));
  CHECK(d_gate_two.same_bits(d_gate_one));
  CHECK(d_value_two.same_bits(d_value_one));

  HostTensor gate_up(dtype, {tokens, 2 * width}), d_gate_up = gate_up, out = one;
  const auto w = static_cast<size_t>(width);
  for (size_t i = 0; i < gate.size(); ++i) {
    gate_up.set(i / w * 2 * w + i % w, gate[i]);
    gate_up.set(i / w * 2 * w + w + i % w, value[i]);
  }
  gated_activation_forward(kCpu, activation, gate_up, width, out);
  gated_activation_backward(kCpu, activation, d_out, gate_up, width, d_gate_up);
  CHECK(out.same_bits(one));
  size_t differ = 0;
  for (size_t i = 0; i < gate.size(); ++i) {
    differ += d_gate_up[i / w * 2 * w + i % w] != d_gate_one[i];
    differ += d_gate_up[i / w * 2 * w + w + i % w] != d_value_one[i];
  }
  CHECK(differ == 0);
}

TEST_CASE("gated_activation of no tokens, on meta, and of wrong operands") {
  const Activation activation = GENERATE(Activation::kSilu, Activation::kGeluTanh);
  const HostTensor none(DType::kF32, {0, 8}), none_out(DType::kF32, {0, 4});
  gated_activation_forward(kCpu, activation, none, 2, none_out);
  gated_activation_backward(kCpu, activation, none_out, none, 2, none);

  const HostTensor gate_up(DType::kF32, {3, 8}), out(DType::kF32, {3, 4}), wide(DType::kF32, {3, 8});
  const Tensor meta = gate_up.on(DeviceType::kMeta), meta_out = out.on(DeviceType::kMeta);
  gated_activation_forward(kMeta, activation, meta, 2, meta_out);
  gated_activation_backward(kMeta, activation, meta_out, meta, 2, meta);

  const auto forward = [&](int64_t width, const Tensor& y) {
    return message_of(ErrorKind::kFault, [&] { gated_activation_forward(kCpu, activation, gate_up, width, y); });
  };
  CHECK(contains(forward(3, out), "not rows of pairs of width 3"));
  CHECK(contains(forward(0, out), "not rows of pairs of width 0"));
  CHECK(contains(forward(2, wide), "out is f32 (3, 8), expected f32 (3, 4)"));
  CHECK(contains(
      message_of(ErrorKind::kFault, [&] { gated_activation_backward(kCpu, activation, out, gate_up, 2, out); }),
      "d_gate_up is"));
}

TEST_CASE("gate of no tokens, on meta, and of wrong operands") {
  const Activation activation = Activation::kGeluTanh;
  const HostTensor none(DType::kF32, {0, 8});
  gate_forward(kCpu, activation, none, none, none);
  gate_backward(kCpu, activation, none, none, none, none, none);

  const HostTensor x(DType::kF32, {3, 4}), wide(DType::kF32, {3, 8}), bf16(DType::kBF16, {3, 4});
  const Tensor meta = x.on(DeviceType::kMeta);
  gate_forward(kMeta, activation, meta, meta, meta);
  gate_backward(kMeta, activation, meta, meta, meta, meta, meta);

  const auto forward = [&](const Tensor& value, const Tensor& out) {
    return message_of(ErrorKind::kFault, [&] { gate_forward(kCpu, activation, x, value, out); });
  };
  CHECK(contains(forward(wide, x), "gate_forward: value is f32 (3, 8), expected f32 (3, 4)"));
  CHECK(contains(forward(x, bf16), "out is bf16 (3, 4), expected f32 (3, 4)"));
  const auto backward = [&](const Tensor& d_out, const Tensor& value, const Tensor& d_gate, const Tensor& d_value) {
    return message_of(ErrorKind::kFault, [&] { gate_backward(kCpu, activation, d_out, x, value, d_gate, d_value); });
  };
  CHECK(contains(backward(wide, x, x, x), "gate_backward: d_out is"));
  CHECK(contains(backward(x, wide, x, x), "value is"));
  CHECK(contains(backward(x, x, wide, x), "d_gate is"));
  CHECK(contains(backward(x, x, x, bf16), "d_value is"));
}

}  // namespace
}  // namespace invar::ops
