#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

// An activation of the form act(x) = x·σ(z(x)).
struct Silu {
  __device__ static float z(float x) { return x; }
  __device__ static float slope(float) { return 1.0f; }
};

// 0.5·(1 + tanh u) = σ(2u).
struct GeluTanh {
  static constexpr float kTwoC = 1.59576912f;  // 2·√(2/π)
  static constexpr float kCubic = 0.044715f;
  __device__ static float z(float x) { return kTwoC * x * fmaf(kCubic * x, x, 1.0f); }
  __device__ static float slope(float x) { return kTwoC * fmaf(3.0f * kCubic * x, x, 1.0f); }
};

template <class Act>
__device__ float sigmoid(float x) {
  return __frcp_rn(__fadd_rn(1.0f, expf(-Act::z(x))));  // not one with the product that ends expf
}
template <class Act>
__device__ float derivative(float x, float sigmoid) {
  return sigmoid * fmaf(x * Act::slope(x), 1.0f - sigmoid, 1.0f);
}

// Where pack i of a gate lies in its buffer, in packs, and how far the pack of the same column of `up` is.
// Rows of [gate, up] blocks, `width` packs each; the blocks of all rows are contiguous, so rows need not be told apart.
struct Interleaved {
  __device__ int64_t gate(int64_t i) const { return i + quotient(i, width) * width; }
  uint32_t width;
};
struct Apart {
  __device__ int64_t gate(int64_t i) const { return i; }
};

template <class Act, class Layout, class T, int N>
struct Forward {
  struct Values {
    Pack<T, N> gate, up;
  };
  __device__ void read(int64_t i, Values& values) const {
    const int64_t at = layout.gate(i) * N;
    values.gate = load_pack<N>(gate + at);
    values.up = load_pack<N>(up + at);
  }
  __device__ void write(int64_t i, const Values& values) const {
    float y[N];
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = values.gate[k] * sigmoid<Act>(values.gate[k]) * values.up[k];
    store_pack(out + i * N, y);
  }

  Layout layout;
  const T* gate;
  const T* up;
  T* out;
};

template <class Act, class Layout, class T, int N>
struct Backward {
  struct Values {
    Pack<T, N> d_out, gate, up;
  };
  __device__ void read(int64_t i, Values& values) const {
    const int64_t at = layout.gate(i) * N;
    values.d_out = load_pack<N>(d_out + i * N);
    values.gate = load_pack<N>(gate + at);
    values.up = load_pack<N>(up + at);
  }
  __device__ void write(int64_t i, const Values& values) const {
    const int64_t at = layout.gate(i) * N;
    float of_gate[N], of_up[N], y[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float x = values.gate[k];
      const float s = sigmoid<Act>(x);
      of_gate[k] = values.d_out[k] * values.up[k] * derivative<Act>(x, s);
      of_up[k] = values.d_out[k] * (x * s);
      y[k] = x * s * values.up[k];
    }
    store_pack(d_gate + at, of_gate);
    store_pack(d_up + at, of_up);
    if (out != nullptr) store_pack(out + i * N, y);
  }

  Layout layout;
  const T* d_out;
  const T* gate;
  const T* up;
  T* d_gate;
  T* d_up;
  T* out;  // null, or where forward's result goes
};

// f(Act, T) with T the elements' type.
template <class F>
void visit(std::string_view op, Activation activation, DType dtype, F&& f) {
  visit_float(op, dtype, [&]<class T>(std::type_identity<T>) {
    switch (activation) {
      case Activation::kSilu:
        return f(Silu{}, std::type_identity<T>{});
      case Activation::kGeluTanh:
        return f(GeluTanh{}, std::type_identity<T>{});
    }
  });
}

// f(N, packs): as many elements at a time as blocks of `width` allow.
template <class T, class F>
void with_block_packs(bool aligned, int64_t n, int64_t width, F&& f) {
  constexpr int kWidth = kVectorWidth<Element<T>>;
  if (aligned && width % kWidth == 0) return f(std::integral_constant<int, kWidth>{}, n / kWidth);
  f(std::integral_constant<int, 1>{}, n);
}

}  // namespace

void gated_activation_forward(const Stream& stream, Activation activation, const Tensor& gate_up, int64_t width,
                              const Tensor& out) {
  constexpr auto kOp = "gated_activation_forward";
  visit(kOp, activation, gate_up.dtype(), [&]<class Act, class S>(Act, std::type_identity<S>) {
    using T = Element<S>;
    const T* gate = elements<S>(gate_up);
    T* y = elements<S>(out);
    with_block_packs<S>(is_aligned({gate, y}), out.numel(), width, [&](auto lanes, int64_t packs) {
      const Interleaved layout{static_cast<uint32_t>(width / lanes())};
      const Forward<Act, Interleaved, T, lanes()> operation{layout, gate, gate + width, y};
      run_elementwise(stream, kOp, packs, operation);
    });
  });
}

void gated_activation_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate_up,
                               int64_t width, const Tensor& d_gate_up, const Tensor& out) {
  constexpr auto kOp = "gated_activation_backward";
  visit(kOp, activation, gate_up.dtype(), [&]<class Act, class S>(Act, std::type_identity<S>) {
    using T = Element<S>;
    const T* dy = elements<S>(d_out);
    const T* gate = elements<S>(gate_up);
    T* d_gate = elements<S>(d_gate_up);
    T* y = out.defined() ? elements<S>(out) : nullptr;
    with_block_packs<S>(is_aligned({dy, gate, d_gate, y}), d_out.numel(), width, [&](auto lanes, int64_t packs) {
      const Interleaved layout{static_cast<uint32_t>(width / lanes())};
      const Backward<Act, Interleaved, T, lanes()> operation{layout, dy, gate, gate + width, d_gate, d_gate + width, y};
      run_elementwise(stream, kOp, packs, operation);
    });
  });
}

void gate_forward(const Stream& stream, Activation activation, const Tensor& gate, const Tensor& value,
                  const Tensor& out) {
  constexpr auto kOp = "gate_forward";
  visit(kOp, activation, gate.dtype(), [&]<class Act, class S>(Act, std::type_identity<S>) {
    using T = Element<S>;
    const T* g = elements<S>(gate);
    const T* v = elements<S>(value);
    T* y = elements<S>(out);
    for_packs<kVectorWidth<T>>(is_aligned({g, v, y}), out.numel(), [&](auto lanes, int64_t first, int64_t packs) {
      const Forward<Act, Apart, T, lanes()> operation{Apart{}, g + first, v + first, y + first};
      run_elementwise(stream, kOp, packs, operation);
    });
  });
}

void gate_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate,
                   const Tensor& value, const Tensor& d_gate, const Tensor& d_value) {
  constexpr auto kOp = "gate_backward";
  visit(kOp, activation, gate.dtype(), [&]<class Act, class S>(Act, std::type_identity<S>) {
    using T = Element<S>;
    const T* dy = elements<S>(d_out);
    const T* g = elements<S>(gate);
    const T* v = elements<S>(value);
    T* dg = elements<S>(d_gate);
    T* dv = elements<S>(d_value);
    const bool aligned = is_aligned({dy, g, v, dg, dv});
    for_packs<kVectorWidth<T>>(aligned, d_out.numel(), [&](auto lanes, int64_t first, int64_t packs) {
      const Backward<Act, Apart, T, lanes()> operation{Apart{},    dy + first, g + first, v + first,
                                                       dg + first, dv + first, nullptr};
      run_elementwise(stream, kOp, packs, operation);
    });
  });
}

}  // namespace invar::ops::cuda
