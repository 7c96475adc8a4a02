#include "ops/per_layer_input.h"

#include <cmath>

#include "ops/cpu/element.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::lane_sum;
using cpu::load;
using cpu::store;

constexpr float kHalfRoot = 0.707106781f;  // 2^(-1/2)

// Index arithmetic of one call. A pair (token, layer) is a row of w columns.
struct Layout {
  int64_t tokens, layers, w;
  float scale, eps, width;

  int64_t pairs() const { return tokens * layers; }
  // First column of a pair in (T, L · w) and in (L · T, w).
  int64_t by_token(int64_t pair) const { return pair * w; }
  int64_t by_layer(int64_t pair) const { return (pair % layers * tokens + pair / layers) * w; }
  float rstd(float squares) const { return 1.0f / std::sqrt(squares / width + eps); }
};

Layout layout_of(std::string_view op, const PerLayerInputParams& params, const Tensor& projected) {
  expect_float(op, "projected", projected, 2);
  INVAR_CHECK(params.layers > 0 && params.width > 0 && projected.dim(1) % params.layers == 0,
              "{}: projected {} for {} layers of width {}", op, projected.describe(), params.layers, params.width);
  return {projected.dim(0), params.layers, projected.dim(1) / params.layers,
          params.scale,     params.eps,    static_cast<float>(params.width)};
}

Layout layout_of(std::string_view op, const PerLayerInputParams& params, const PerLayerProjection& projection) {
  const Layout layout = layout_of(op, params, projection.projected);
  expect(op, "squares", projection.squares, DType::kF32, {layout.tokens, layout.layers});
  expect(op, "weight", projection.weight, projection.projected.dtype(), {layout.w});
  return layout;
}

// The columns of each of a call's sums: the leaves, or all columns as one.
class Leaves {
 public:
  Leaves(std::string_view op, std::string_view name, const Tensor& sums, const Layout& at,
         std::span<const Range> leaves)
      : all_{0, at.w}, cut_(leaves) {
    if (leaves.empty()) {
      expect(op, name, sums, DType::kF32, {at.tokens, at.layers});
      return;
    }
    int64_t end = 0;
    for (const Range leaf : leaves) {
      INVAR_CHECK(leaf.begin == end && leaf.end > end, "{}: a leaf of columns [{}, {}) after column {}", op, leaf.begin,
                  leaf.end, end);
      end = leaf.end;
    }
    INVAR_CHECK(end == at.w, "{}: leaves end at column {} of {}", op, end, at.w);
    expect(op, name, sums, DType::kF32, {std::ssize(leaves), at.tokens, at.layers});
  }

  std::span<const Range> get() const { return cut_.empty() ? std::span<const Range>(&all_, 1) : cut_; }

 private:
  Range all_;
  std::span<const Range> cut_;
};

template <class T>
void squares_cpu(int threads, Layout at, std::span<const Range> leaves, const T* projected, float* squares) {
  cpu::parallel_for(threads, at.pairs(), at.w, [=](Range pairs) {
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      const T* p = projected + at.by_token(pair);
      for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
        const T* of_leaf = p + leaves[leaf].begin;
        const float sum = lane_sum(leaves[leaf].size(), [=](int64_t i, float before) {
          const float c = load(of_leaf[i]) * at.scale;
          return std::fma(c, c, before);
        });
        squares[static_cast<int64_t>(leaf) * at.pairs() + pair] = sum;
      }
    }
  });
}

template <class T>
void forward_cpu(int threads, Layout at, const T* projected, const float* squares, const T* weight, const T* looked_up,
                 T* inputs) {
  cpu::parallel_for(threads, at.pairs(), at.w, [=](Range pairs) {
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      const T* p = projected + at.by_token(pair);
      const T* e = looked_up + at.by_token(pair);
      T* out = inputs + at.by_layer(pair);
      const float rstd = at.rstd(squares[pair]);
      for (int64_t i = 0; i < at.w; ++i) {
        const float u = load(p[i]) * at.scale * rstd;
        store(out[i], std::fma(u, load(weight[i]), load(e[i])) * kHalfRoot);
      }
    }
  });
}

template <class T>
void dots_cpu(int threads, Layout at, std::span<const Range> leaves, const T* projected, const float* squares,
              const T* weight, const T* d_inputs, float* dots) {
  cpu::parallel_for(threads, at.pairs(), at.w, [=](Range pairs) {
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      const float rstd = at.rstd(squares[pair]);
      for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
        const int64_t begin = leaves[leaf].begin;
        const T* p = projected + at.by_token(pair) + begin;
        const T* d = d_inputs + at.by_layer(pair) + begin;
        const T* gain = weight + begin;
        const float sum = lane_sum(leaves[leaf].size(), [=](int64_t i, float before) {
          const float g = load(d[i]) * kHalfRoot * load(gain[i]);
          return std::fma(g, load(p[i]) * at.scale * rstd, before);
        });
        dots[static_cast<int64_t>(leaf) * at.pairs() + pair] = sum;
      }
    }
  });
}

// Terms of d_weight, column by column; `run` pairs have a row of it each.
template <class T>
void weight_gradient_cpu(int threads, Layout at, const T* projected, const float* squares, const T* d_inputs,
                         int64_t run, float* d_weight) {
  cpu::parallel_columns(threads, at.w, at.pairs(), [=](Range columns) {
    for (int64_t pair = 0; pair < at.pairs(); ++pair) {
      const T* p = projected + at.by_token(pair);
      const T* d = d_inputs + at.by_layer(pair);
      float* sums = d_weight + pair / run * at.w;
      const float rstd = at.rstd(squares[pair]);
      for (int64_t i = columns.begin; i < columns.end; ++i) {
        sums[i] = std::fma(load(d[i]) * kHalfRoot, load(p[i]) * at.scale * rstd, sums[i]);
      }
    }
  });
}

template <class T>
void backward_cpu(int threads, Layout at, const T* projected, const float* squares, const T* weight, const T* d_inputs,
                  const float* dots, T* d_projected, T* d_looked_up) {
  cpu::parallel_for(threads, at.pairs(), at.w, [=](Range pairs) {
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
      const T* p = projected + at.by_token(pair);
      const T* d = d_inputs + at.by_layer(pair);
      T* d_p = d_projected + at.by_token(pair);
      T* d_e = d_looked_up + at.by_token(pair);
      const float rstd = at.rstd(squares[pair]);
      const float mean = dots[pair] / at.width;
      for (int64_t i = 0; i < at.w; ++i) {
        const float d_sum = load(d[i]) * kHalfRoot;
        const float u = load(p[i]) * at.scale * rstd;
        store(d_p[i], at.scale * rstd * std::fma(-u, mean, d_sum * load(weight[i])));
        store(d_e[i], d_sum);
      }
    }
  });
}

}  // namespace

void per_layer_squares(const Stream& stream, const PerLayerInputParams& params, const Tensor& projected,
                       const Tensor& squares, std::span<const Range> leaves) {
  constexpr auto kOp = "per_layer_squares";
  const Layout at = layout_of(kOp, params, projected);
  const Leaves sums(kOp, "squares", squares, at, leaves);
  if (!has_work(kOp, stream, {&projected, &squares})) return;
  if (on_cuda(stream)) return cuda::per_layer_squares(stream, params, projected, squares, sums.get());
  visit_float(kOp, projected.dtype(), [&]<class T>(std::type_identity<T>) {
    squares_cpu(stream.threads(), at, sums.get(), projected.data<T>(), squares.data<float>());
  });
}

void per_layer_input_forward(const Stream& stream, const PerLayerInputParams& params,
                             const PerLayerProjection& projection, const Tensor& looked_up, const Tensor& inputs) {
  constexpr auto kOp = "per_layer_input_forward";
  const auto& [projected, squares, weight] = projection;
  const Layout at = layout_of(kOp, params, projection);
  expect(kOp, "looked_up", looked_up, projected.dtype(), {at.tokens, at.layers * at.w});
  expect(kOp, "inputs", inputs, projected.dtype(), {at.pairs(), at.w});
  if (!has_work(kOp, stream, {&projected, &squares, &weight, &looked_up, &inputs})) return;
  if (on_cuda(stream)) return cuda::per_layer_input_forward(stream, params, projection, looked_up, inputs);
  visit_float(kOp, inputs.dtype(), [&]<class T>(std::type_identity<T>) {
    forward_cpu(stream.threads(), at, projection.projected.data<T>(), projection.squares.data<float>(),
                projection.weight.data<T>(), looked_up.data<T>(), inputs.data<T>());
  });
}

void per_layer_dots(const Stream& stream, const PerLayerInputParams& params, const PerLayerProjection& projection,
                    const Tensor& d_inputs, const Tensor& dots, std::span<const Range> leaves) {
  constexpr auto kOp = "per_layer_dots";
  const auto& [projected, squares, weight] = projection;
  const Layout at = layout_of(kOp, params, projection);
  expect(kOp, "d_inputs", d_inputs, projected.dtype(), {at.pairs(), at.w});
  const Leaves sums(kOp, "dots", dots, at, leaves);
  if (!has_work(kOp, stream, {&projected, &squares, &weight, &d_inputs, &dots})) return;
  if (on_cuda(stream)) return cuda::per_layer_dots(stream, params, projection, d_inputs, dots, sums.get());
  visit_float(kOp, d_inputs.dtype(), [&]<class T>(std::type_identity<T>) {
    dots_cpu(stream.threads(), at, sums.get(), projection.projected.data<T>(), projection.squares.data<float>(),
             projection.weight.data<T>(), d_inputs.data<T>(), dots.data<float>());
  });
}

void per_layer_input_backward(const Stream& stream, const PerLayerInputParams& params,
                              const PerLayerProjection& projection, const Tensor& d_inputs, const Tensor& dots,
                              const Tensor& d_projected, const Tensor& d_looked_up, const Tensor& d_weight) {
  constexpr auto kOp = "per_layer_input_backward";
  const auto& [projected, squares, weight] = projection;
  const Layout at = layout_of(kOp, params, projection);
  expect(kOp, "d_inputs", d_inputs, projected.dtype(), {at.pairs(), at.w});
  expect(kOp, "dots", dots, DType::kF32, {at.tokens, at.layers});
  expect(kOp, "d_projected", d_projected, projected.dtype(), {at.tokens, at.layers * at.w});
  expect(kOp, "d_looked_up", d_looked_up, projected.dtype(), {at.tokens, at.layers * at.w});
  const Tensor sums = expect_token_blocks(kOp, d_weight, at.tokens, at.w);
  if (!has_work(kOp, stream, {&projected, &squares, &weight, &d_inputs, &dots, &d_projected, &d_looked_up, &d_weight}))
    return;
  if (on_cuda(stream))
    return cuda::per_layer_input_backward(stream, params, projection, d_inputs, dots, d_projected, d_looked_up, sums);
  visit_float(kOp, d_inputs.dtype(), [&]<class T>(std::type_identity<T>) {
    const T* p = projection.projected.data<T>();
    const float* total = projection.squares.data<float>();
    weight_gradient_cpu(stream.threads(), at, p, total, d_inputs.data<T>(), at.pairs() / sums.dim(0),
                        sums.data<float>());
    backward_cpu(stream.threads(), at, p, total, projection.weight.data<T>(), d_inputs.data<T>(), dots.data<float>(),
                 d_projected.data<T>(), d_looked_up.data<T>());
  });
}

}  // namespace invar::ops
