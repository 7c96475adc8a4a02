#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/gated_activation.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// out of one [gate, up] block after another.
Values reference(const Values& gate_up, size_t width) {
  Values out(gate_up.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t at = i / width * 2 * width + i % width;
    const double gate = gate_up[at];
    out[i] = gate / (1 + std::exp(-gate)) * gate_up[at + width];
  }
  return out;
}

TEST_CASE("gated_activation forward and backward are the formula and its derivative") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t blocks = GENERATE(1, 2), width = GENERATE(1, 7, 16, 37, 515), tokens = width > 100 ? 1 : 3;
  const HostTensor gate_up = random_tensor(dtype, {tokens, blocks * 2 * width}, 1, 6.0);
  const HostTensor d_out = random_tensor(dtype, {tokens, blocks * width}, 2);
  HostTensor out(dtype, {tokens, blocks * width}), d_gate_up(dtype, {tokens, blocks * 2 * width});

  gated_activation_forward(kCpu, Activation::kSilu, gate_up, width, out);
  require_rounded(out, reference(gate_up.values(), static_cast<size_t>(width)));

  gated_activation_backward(kCpu, Activation::kSilu, d_out, gate_up, width, d_gate_up);
  const auto loss = [&](const Values& x) { return dot(reference(x, static_cast<size_t>(width)), d_out.values()); };
  require_rounded(d_gate_up, numeric_gradient(loss, gate_up.values()));

  HostTensor in_place = gate_up;
  gated_activation_backward(kCpu, Activation::kSilu, d_out, in_place, width, in_place);
  CHECK(in_place.same_bits(d_gate_up));
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

TEST_CASE("gated_activation gives the same bits on two threads") {
  const int64_t tokens = 33, blocks = 5, width = 201;
  REQUIRE(tokens * blocks * width >= 2 * cpu::kMinWorkPerThread);
  const HostTensor gate_up = random_tensor(DType::kBF16, {tokens, blocks * 2 * width}, 1, 3.0);
  const HostTensor d_out = random_tensor(DType::kBF16, {tokens, blocks * width}, 2);
  HostTensor one(DType::kBF16, {tokens, blocks * width}), two = one;
  gated_activation_forward(kCpu, Activation::kSilu, gate_up, width, one);
  gated_activation_forward(kTwoThreads, Activation::kSilu, gate_up, width, two);
  CHECK(two.same_bits(one));
  HostTensor d_one = gate_up, d_two = gate_up;
  gated_activation_backward(kCpu, Activation::kSilu, d_out, d_one, width, d_one);
  gated_activation_backward(kTwoThreads, Activation::kSilu, d_out, d_two, width, d_two);
  CHECK(d_two.same_bits(d_one));
}

TEST_CASE("gated_activation of no tokens, on meta, and of wrong operands") {
  const HostTensor none(DType::kF32, {0, 8}), none_out(DType::kF32, {0, 4});
  gated_activation_forward(kCpu, Activation::kSilu, none, 2, none_out);
  gated_activation_backward(kCpu, Activation::kSilu, none_out, none, 2, none);

  const HostTensor gate_up(DType::kF32, {3, 8}), out(DType::kF32, {3, 4}), wide(DType::kF32, {3, 8});
  const Tensor meta = gate_up.on(DeviceType::kMeta), meta_out = out.on(DeviceType::kMeta);
  gated_activation_forward(kMeta, Activation::kSilu, meta, 2, meta_out);
  gated_activation_backward(kMeta, Activation::kSilu, meta_out, meta, 2, meta);

  const auto forward = [&](int64_t width, const Tensor& y) {
    return message_of(ErrorKind::kFault, [&] { gated_activation_forward(kCpu, Activation::kSilu, gate_up, width, y); });
  };
  CHECK(contains(forward(3, out), "not rows of pairs of width 3"));
  CHECK(contains(forward(0, out), "not rows of pairs of width 0"));
  CHECK(contains(forward(2, wide), "out is f32 (3, 8), expected f32 (3, 4)"));
  CHECK(contains(
      message_of(ErrorKind::kFault, [&] { gated_activation_backward(kCpu, Activation::kSilu, out, gate_up, 2, out); }),
      "d_gate_up is"));
}

}  // namespace
}  // namespace invar::ops
