#include "ops/gated_activation.h"

#include <cmath>

#include "ops/cpu/element.h"
#include "ops/cpu/exp_block.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::load;
using cpu::store;

// An activation of the form act(x) = x·σ(z(x)); e is e^(-z).
struct Silu {
  static float exponent(float x) { return -x; }
  static float value(float x, float e) { return x / (1.0f + e); }
  static float derivative(float x, float e) {
    const float sigmoid = 1.0f / (1.0f + e);
    return sigmoid * std::fma(x, 1.0f - sigmoid, 1.0f);
  }
};

// 0.5·(1 + tanh u) = σ(2u).
struct GeluTanh {
  static constexpr float kTwoC = 1.59576912f;  // 2·√(2/π)
  static constexpr float kCubic = 0.044715f;
  static float exponent(float x) { return -kTwoC * x * std::fma(kCubic * x, x, 1.0f); }
  static float value(float x, float e) { return x / (1.0f + e); }
  static float derivative(float x, float e) {
    const float sigmoid = 1.0f / (1.0f + e);
    const float slope = kTwoC * std::fma(3.0f * kCubic * x, x, 1.0f);
    return sigmoid * std::fma(x * slope, 1.0f - sigmoid, 1.0f);
  }
};

// n neighbours: y = act(gate) · up.
template <class Act, class T>
void forward_run(int64_t n, const T* gate, const T* up, T* y) {
  const auto exponent = [=](int64_t i) { return Act::exponent(load(gate[i])); };
  cpu::for_exp_blocks(n, exponent, [=](int64_t first, int64_t count, const float* e) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      store(y[first + i], Act::value(load(gate[first + i]), e[i]) * load(up[first + i]));
    }
  });
}

template <class Act, class T>
void backward_run(int64_t n, const T* dy, const T* gate, const T* up, T* d_gate, T* d_up) {
  const auto exponent = [=](int64_t i) { return Act::exponent(load(gate[i])); };
  cpu::for_exp_blocks(n, exponent, [=](int64_t first, int64_t count, const float* e) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const int64_t c = first + i;
      const float g = load(gate[c]);
      const float d = load(dy[c]);
      const float d_value = d * load(up[c]);
      store(d_gate[c], d_value * Act::derivative(g, e[i]));
      store(d_up[c], d * Act::value(g, e[i]));
    }
  });
}

// A row of gate_up is [gate, up] blocks; the blocks of all rows are contiguous, so rows need not be told apart.
template <class Act, class T>
void forward_blocks(int threads, int64_t blocks, int64_t width, const T* gate_up, T* out) {
  cpu::parallel_for(threads, blocks, width, [=](Range range) {
    for (int64_t block = range.begin; block < range.end; ++block) {
      const T* gate = gate_up + block * 2 * width;
      forward_run<Act>(width, gate, gate + width, out + block * width);
    }
  });
}

template <class Act, class T>
void backward_blocks(int threads, int64_t blocks, int64_t width, const T* d_out, const T* gate_up, T* d_gate_up) {
  cpu::parallel_for(threads, blocks, width, [=](Range range) {
    for (int64_t block = range.begin; block < range.end; ++block) {
      const T* gate = gate_up + block * 2 * width;
      T* d_gate = d_gate_up + block * 2 * width;
      backward_run<Act>(width, d_out + block * width, gate, gate + width, d_gate, d_gate + width);
    }
  });
}

template <class F>
void visit_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSilu:
      return f(Silu{});
    case Activation::kGeluTanh:
      return f(GeluTanh{});
  }
}

// Checks the two shapes and returns the number of [gate, up] pairs of all rows together.
int64_t count_blocks(std::string_view op, const Tensor& gate_up, int64_t width, std::string_view name,
                     const Tensor& out) {
  expect_float(op, "gate_up", gate_up, 2);
  INVAR_CHECK(width > 0 && gate_up.dim(1) % (2 * width) == 0, "{}: gate_up {} is not rows of pairs of width {}", op,
              gate_up.describe(), width);
  expect(op, name, out, gate_up.dtype(), {gate_up.dim(0), gate_up.dim(1) / 2});
  return gate_up.numel() / (2 * width);
}

}  // namespace

void gated_activation_forward(const Stream& stream, Activation activation, const Tensor& gate_up, int64_t width,
                              const Tensor& out) {
  constexpr auto kOp = "gated_activation_forward";
  const int64_t blocks = count_blocks(kOp, gate_up, width, "out", out);
  if (!has_work(kOp, stream, {&gate_up, &out})) return;
  if (on_cuda(stream)) return cuda::gated_activation_forward(stream, activation, gate_up, width, out);
  visit_activation(activation, [&]<class Act>(Act) {
    visit_float(kOp, gate_up.dtype(), [&]<class T>(std::type_identity<T>) {
      forward_blocks<Act>(stream.threads(), blocks, width, gate_up.data<T>(), out.data<T>());
    });
  });
}

void gated_activation_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate_up,
                               int64_t width, const Tensor& d_gate_up, const Tensor& out) {
  constexpr auto kOp = "gated_activation_backward";
  const int64_t blocks = count_blocks(kOp, gate_up, width, "d_out", d_out);
  if (out.defined()) count_blocks(kOp, gate_up, width, "out", out);
  expect(kOp, "d_gate_up", d_gate_up, gate_up.dtype(), {gate_up.dim(0), gate_up.dim(1)});
  if (!has_work(kOp, stream, {&d_out, &gate_up, &d_gate_up, &out})) return;
  if (on_cuda(stream))
    return cuda::gated_activation_backward(stream, activation, d_out, gate_up, width, d_gate_up, out);
  if (out.defined()) gated_activation_forward(stream, activation, gate_up, width, out);
  visit_activation(activation, [&]<class Act>(Act) {
    visit_float(kOp, gate_up.dtype(), [&]<class T>(std::type_identity<T>) {
      backward_blocks<Act>(stream.threads(), blocks, width, d_out.data<T>(), gate_up.data<T>(), d_gate_up.data<T>());
    });
  });
}

void gate_forward(const Stream& stream, Activation activation, const Tensor& gate, const Tensor& value,
                  const Tensor& out) {
  constexpr auto kOp = "gate_forward";
  expect_float(kOp, "gate", gate, 2);
  expect(kOp, "value", value, gate.dtype(), {gate.dim(0), gate.dim(1)});
  expect(kOp, "out", out, gate.dtype(), {gate.dim(0), gate.dim(1)});
  if (!has_work(kOp, stream, {&gate, &value, &out})) return;
  if (on_cuda(stream)) return cuda::gate_forward(stream, activation, gate, value, out);
  visit_activation(activation, [&]<class Act>(Act) {
    visit_float(kOp, gate.dtype(), [&]<class T>(std::type_identity<T>) {
      cpu::parallel_for(stream.threads(), gate.numel(), 1, [&](Range range) {
        const int64_t at = range.begin;
        forward_run<Act>(range.size(), gate.data<T>() + at, value.data<T>() + at, out.data<T>() + at);
      });
    });
  });
}

void gate_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate,
                   const Tensor& value, const Tensor& d_gate, const Tensor& d_value) {
  constexpr auto kOp = "gate_backward";
  expect_float(kOp, "gate", gate, 2);
  expect(kOp, "d_out", d_out, gate.dtype(), {gate.dim(0), gate.dim(1)});
  expect(kOp, "value", value, gate.dtype(), {gate.dim(0), gate.dim(1)});
  expect(kOp, "d_gate", d_gate, gate.dtype(), {gate.dim(0), gate.dim(1)});
  expect(kOp, "d_value", d_value, gate.dtype(), {gate.dim(0), gate.dim(1)});
  if (!has_work(kOp, stream, {&d_out, &gate, &value, &d_gate, &d_value})) return;
  if (on_cuda(stream)) return cuda::gate_backward(stream, activation, d_out, gate, value, d_gate, d_value);
  visit_activation(activation, [&]<class Act>(Act) {
    visit_float(kOp, gate.dtype(), [&]<class T>(std::type_identity<T>) {
      cpu::parallel_for(stream.threads(), gate.numel(), 1, [&](Range range) {
        const int64_t at = range.begin;
        backward_run<Act>(range.size(), d_out.data<T>() + at, gate.data<T>() + at, value.data<T>() + at,
                          d_gate.data<T>() + at, d_value.data<T>() + at);
      });
    });
  });
}

}  // namespace invar::ops
