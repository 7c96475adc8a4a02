#include "ops/norm.h"

#include <cmath>
#include <vector>

#include "core/elementary.h"
#include "device/device.h"
#include "ops/cpu/element.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"

namespace invar::ops {

namespace {

using cpu::lane_sum;
using cpu::load;
using cpu::store;

template <class T>
float reciprocal_rms(const T* x, int64_t n, float eps) {
  const float squares = lane_sum(n, [=](int64_t i, float sum) { return std::fma(load(x[i]), load(x[i]), sum); });
  return 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
}

// A norm's weight: one factor per column, or none.
template <class T>
struct Weighted {
  float operator[](int64_t i) const { return load(data[i]); }
  const T* data;
};
struct Weightless {
  float operator[](int64_t) const { return 1.0f; }
};

// mean(g·u) with g = d_y·weight, u = x·rstd.
template <class D, class Factors, class T>
float mean_of_projection(const D* d_y, Factors weight, const T* x, float rstd, int64_t n) {
  const float total =
      lane_sum(n, [=](int64_t i, float sum) { return std::fma(load(d_y[i]) * weight[i], load(x[i]) * rstd, sum); });
  return total / static_cast<float>(n);
}

template <class T>
void rms_norm_forward_cpu(int threads, int64_t tokens, int64_t width, const T* x, const T* weight, float eps, T* y,
                          float* rstd) {
  cpu::parallel_for(threads, tokens, width, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const T* in = x + t * width;
      T* out = y + t * width;
      const float r = reciprocal_rms(in, width, eps);
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) store(out[c], load(in[c]) * r * load(weight[c]));
      rstd[t] = r;
    }
  });
}

// `run` tokens have a row of d_weight each.
template <class T>
void rms_norm_backward_cpu(int threads, int64_t tokens, int64_t width, const T* d_y, const T* x, const T* weight,
                           const float* rstd, Write write, T* d_x, int64_t run, float* d_weight) {
  cpu::parallel_columns(threads, width, tokens, [=](Range columns) {
    for (int64_t t = 0; t < tokens; ++t) {
      float* sums = d_weight + t / run * width;
      const T* dy = d_y + t * width;
      const T* in = x + t * width;
      const float r = rstd[t];
#pragma omp simd
      for (int64_t c = columns.begin; c < columns.end; ++c) {
        sums[c] = std::fma(load(dy[c]), load(in[c]) * r, sums[c]);
      }
    }
  });
  cpu::parallel_for(threads, tokens, width, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const T* dy = d_y + t * width;
      const T* in = x + t * width;
      T* dx = d_x + t * width;
      const float r = rstd[t];
      const float mean = mean_of_projection(dy, Weighted<T>{weight}, in, r, width);
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        const float g = load(dy[c]) * load(weight[c]);
        const float u = load(in[c]) * r;
        const float before = write == Write::kAdd ? load(dx[c]) : 0.0f;
        store(dx[c], std::fma(r, std::fma(-u, mean, g), before));
      }
    }
  });
}

// A HeadView as rows of head_dim elements: (token, head) pairs, tokens outermost.
template <class T>
struct HeadRows {
  explicit HeadRows(const HeadView& of)
      : view(of), data(of.buffer.data<T>()), heads(of.heads()), head_dim(of.head_dim) {}

  T* row(int64_t index) const { return data + view.index(index / heads, index % heads); }

  HeadView view;
  T* data;
  int64_t heads, head_dim;
};

struct Rotation {
  explicit Rotation(const HeadNormRope& params) : length(params.sequence_length) {
    if (params.rope == nullptr) return;
    cos = params.rope->cos.data<float>();
    sin = params.rope->sin.data<float>();
    half = params.rope->cos.dim(1);
    if (params.document_starts.defined()) starts = params.document_starts.data<int32_t>();
  }
  explicit operator bool() const { return cos != nullptr; }
  int64_t row(int64_t token) const { return (token % length - (starts == nullptr ? 0 : starts[token])) * half; }

  const float* cos = nullptr;
  const float* sin = nullptr;
  const int32_t* starts = nullptr;
  int64_t half = 0;
  int64_t length;
};

// out[i] = value(i), rotated if there are angles.
template <class Value, class T>
void write_head(const Value& value, const float* cos, const float* sin, int64_t head_dim, T* out) {
  if (cos == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < head_dim; ++i) store(out[i], value(i));
    return;
  }
  const int64_t half = head_dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = value(i);
    const float b = value(i + half);
    store(out[i], std::fma(a, cos[i], -(b * sin[i])));
    store(out[i + half], std::fma(b, cos[i], a * sin[i]));
  }
}

template <class T, class Factors>
void head_norm_rope_forward_cpu(int threads, int64_t tokens, HeadRows<T> in, Factors weight, float eps,
                                Rotation rotation, HeadRows<T> out) {
  const int64_t head_dim = in.head_dim;
  cpu::parallel_for(threads, tokens * in.heads, head_dim, [=](Range rows) {
    for (int64_t index = rows.begin; index < rows.end; ++index) {
      const T* x = in.row(index);
      const int64_t angles = rotation ? rotation.row(index / in.heads) : 0;
      const float* cos = rotation ? rotation.cos + angles : nullptr;
      const float* sin = rotation ? rotation.sin + angles : nullptr;
      const float rstd = reciprocal_rms(x, head_dim, eps);
      const auto normed = [=](int64_t i) { return load(x[i]) * rstd * weight[i]; };
      write_head(normed, cos, sin, head_dim, out.row(index));
    }
  });
}

// d_normed = R(position)ᵀ · d_out.
template <class T>
void rotate_back(const T* d_out, const float* cos, const float* sin, int64_t half, float* d_normed) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(d_out[i]);
    const float b = load(d_out[i + half]);
    d_normed[i] = std::fma(a, cos[i], b * sin[i]);
    d_normed[i + half] = std::fma(b, cos[i], -(a * sin[i]));
  }
}

// d_in of one head from the gradient of its normed value, which is replaced by the terms of d_weight.
template <class T, class Factors>
void head_norm_backward(const T* in, Factors weight, float eps, int64_t head_dim, float* d_normed, Write write,
                        T* d_in) {
  const float rstd = reciprocal_rms(in, head_dim, eps);
  const float mean = mean_of_projection(d_normed, weight, in, rstd, head_dim);
#pragma omp simd
  for (int64_t i = 0; i < head_dim; ++i) {
    const float u = load(in[i]) * rstd;
    const float g = d_normed[i] * weight[i];
    const float before = write == Write::kAdd ? load(d_in[i]) : 0.0f;
    store(d_in[i], std::fma(rstd, std::fma(-u, mean, g), before));
    d_normed[i] *= u;
  }
}

// The rows that a head norm's weight gradient is added to: one, or one per head and run of tokens.
struct WeightRows {
  WeightRows(const Tensor& d_weight, int64_t tokens) {
    if (!d_weight.defined()) return;
    data = d_weight.data<float>();
    head_dim = d_weight.shape().back();
    if (d_weight.dims() == 1) return;
    blocks = d_weight.dim(1);
    run = tokens / blocks;
  }
  float* row(int64_t token, int64_t head) const {
    return blocks == 0 ? data : data + (head * blocks + token / run) * head_dim;
  }

  float* data = nullptr;
  int64_t head_dim = 0;
  int64_t blocks = 0;
  int64_t run = 0;
};

template <class T, class Factors>
void head_norm_rope_backward_cpu(int threads, int64_t tokens, HeadRows<T> d_out, HeadRows<T> in, Factors weight,
                                 float eps, Rotation rotation, Write write, HeadRows<T> d_in, WeightRows d_weight) {
  // A block of rows at a time, so that the terms of d_weight, summed per column, stay in cache.
  constexpr int64_t kBlockRows = 256;
  const int64_t head_dim = in.head_dim;
  const int64_t total = tokens * in.heads;
  std::vector<float> scratch(static_cast<size_t>(std::min(total, kBlockRows) * head_dim));
  float* const terms = scratch.data();
  for (int64_t first = 0; first < total; first += kBlockRows) {
    const int64_t count = std::min(total - first, kBlockRows);
    cpu::parallel_for(threads, count, head_dim, [=](Range rows) {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t index = first + r;
        const T* d = d_out.row(index);
        T* out = d_in.row(index);
        float* d_normed = terms + r * head_dim;
        if (rotation) {
          const int64_t angles = rotation.row(index / in.heads);
          rotate_back(d, rotation.cos + angles, rotation.sin + angles, rotation.half, d_normed);
        } else {
          for (int64_t i = 0; i < head_dim; ++i) d_normed[i] = load(d[i]);
        }
        head_norm_backward(in.row(index), weight, eps, head_dim, d_normed, write, out);
      }
    });
    if (d_weight.data == nullptr) continue;
    for (int64_t r = 0; r < count; ++r) {
      float* sums = d_weight.row((first + r) / in.heads, (first + r) % in.heads);
      for (int64_t i = 0; i < head_dim; ++i) sums[i] += terms[r * head_dim + i];
    }
  }
}

void expect_rope(std::string_view op, const RopeTable* rope, int64_t sequence_length, int64_t head_dim) {
  if (rope == nullptr) return;
  INVAR_CHECK(head_dim % 2 == 0, "{}: rotate-half pairs need an even head_dim, not {}", op, head_dim);
  INVAR_CHECK(rope->cos.dims() == 2 && sequence_length > 0 && sequence_length <= rope->cos.dim(0),
              "{}: rope table {} for sequences of {}", op, rope->cos.describe(), sequence_length);
  expect(op, "rope cos", rope->cos, DType::kF32, {rope->cos.dim(0), head_dim / 2});
  expect(op, "rope sin", rope->sin, DType::kF32, {rope->cos.dim(0), head_dim / 2});
}

void expect_weight_rows(std::string_view op, const Tensor& d_weight, const HeadView& in) {
  if (d_weight.dims() != 3) return expect(op, "d_weight", d_weight, DType::kF32, {in.head_dim});
  const int64_t blocks = d_weight.dim(1);
  expect(op, "d_weight", d_weight, DType::kF32, {in.heads(), blocks, in.head_dim});
  INVAR_CHECK(blocks > 0 && in.tokens() % blocks == 0, "{}: d_weight has {} blocks for {} tokens", op, blocks,
              in.tokens());
}

void expect_params(std::string_view op, const HeadNormRope& params, const HeadView& in) {
  expect_heads(op, "in", in);
  if (params.weight.defined()) expect(op, "weight", params.weight, in.buffer.dtype(), {in.head_dim});
  expect_rope(op, params.rope, params.sequence_length, in.head_dim);
  const Tensor& starts = params.document_starts;
  if (starts.defined()) expect(op, "document_starts", starts, DType::kI32, {in.tokens()});
}

}  // namespace

void rms_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, float eps, const Tensor& y,
                      const Tensor& rstd) {
  constexpr auto kOp = "rms_norm_forward";
  expect_float(kOp, "x", x, 2);
  expect(kOp, "weight", weight, x.dtype(), {x.dim(1)});
  expect(kOp, "y", y, x.dtype(), {x.dim(0), x.dim(1)});
  expect(kOp, "rstd", rstd, DType::kF32, {x.dim(0)});
  if (!has_work(kOp, stream, {&x, &weight, &y, &rstd})) return;
  if (on_cuda(stream)) return cuda::rms_norm_forward(stream, x, weight, eps, y, rstd);
  visit_float(kOp, x.dtype(), [&]<class T>(std::type_identity<T>) {
    rms_norm_forward_cpu(stream.threads(), x.dim(0), x.dim(1), x.data<T>(), weight.data<T>(), eps, y.data<T>(),
                         rstd.data<float>());
  });
}

void add_rms_norm_forward(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& weight, float eps,
                          const Tensor& sum, const Tensor& y, const Tensor& rstd) {
  constexpr auto kOp = "add_rms_norm_forward";
  expect_float(kOp, "sum", sum, 2);
  for (const Tensor* tensor : {&a, &b, &y}) expect(kOp, "an operand", *tensor, sum.dtype(), {sum.dim(0), sum.dim(1)});
  expect(kOp, "weight", weight, sum.dtype(), {sum.dim(1)});
  expect(kOp, "rstd", rstd, DType::kF32, {sum.dim(0)});
  if (!has_work(kOp, stream, {&a, &b, &weight, &sum, &y, &rstd})) return;
  if (on_cuda(stream)) return cuda::add_rms_norm_forward(stream, a, b, weight, eps, sum, y, rstd);
  add(stream, a, b, sum);
  rms_norm_forward(stream, sum, weight, eps, y, rstd);
}

void rms_norm_backward(const Stream& stream, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, Write write, const Tensor& d_x, const Tensor& d_weight) {
  constexpr auto kOp = "rms_norm_backward";
  expect_float(kOp, "x", x, 2);
  expect(kOp, "d_y", d_y, x.dtype(), {x.dim(0), x.dim(1)});
  expect(kOp, "weight", weight, x.dtype(), {x.dim(1)});
  expect(kOp, "rstd", rstd, DType::kF32, {x.dim(0)});
  expect(kOp, "d_x", d_x, x.dtype(), {x.dim(0), x.dim(1)});
  const Tensor sums = expect_token_blocks(kOp, d_weight, x.dim(0), x.dim(1));
  if (!has_work(kOp, stream, {&d_y, &x, &weight, &rstd, &d_x, &d_weight})) return;
  if (on_cuda(stream)) return cuda::rms_norm_backward(stream, d_y, x, weight, rstd, write, d_x, sums);
  visit_float(kOp, x.dtype(), [&]<class T>(std::type_identity<T>) {
    rms_norm_backward_cpu(stream.threads(), x.dim(0), x.dim(1), d_y.data<T>(), x.data<T>(), weight.data<T>(),
                          rstd.data<float>(), write, d_x.data<T>(), x.dim(0) / sums.dim(0), sums.data<float>());
  });
}

void fill_rope_table(const Stream& stream, const RopeTable& table, double theta, int64_t head_dim,
                     int64_t rotated_pairs) {
  constexpr auto kOp = "fill_rope_table";
  INVAR_CHECK(table.cos.dims() == 2 && head_dim > 0, "{}: cos is {}, head_dim {}", kOp, table.cos.describe(), head_dim);
  expect_rope(kOp, &table, table.cos.dim(0), head_dim);
  const int64_t half = head_dim / 2;
  INVAR_CHECK(0 <= rotated_pairs && rotated_pairs <= half, "{}: {} pairs turn of {}", kOp, rotated_pairs, half);
  if (!has_work(kOp, stream, {&table.cos, &table.sin})) return;
  std::vector<float> cos(static_cast<size_t>(table.cos.numel()));
  std::vector<float> sin(cos.size());
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
    const auto inv_freq = i < rotated_pairs ? static_cast<float>(elementary::pow(theta, exponent)) : 0.0f;
    for (int64_t position = 0; position < table.cos.dim(0); ++position) {
      const float angle = static_cast<float>(position) * inv_freq;
      const auto at = static_cast<size_t>(position * half + i);
      cos[at] = static_cast<float>(elementary::cos(static_cast<double>(angle)));
      sin[at] = static_cast<float>(elementary::sin(static_cast<double>(angle)));
    }
  }
  copy_across(stream, view_of(cos), table.cos);
  copy_across(stream, view_of(sin), table.sin);
}

void head_norm_rope_forward(const Stream& stream, const HeadNormRope& params, const HeadView& in, const HeadView& out) {
  constexpr auto kOp = "head_norm_rope_forward";
  expect_params(kOp, params, in);
  expect_heads_like(kOp, "out", out, in);
  if (!has_work(kOp, stream, {&in.buffer, &params.weight, &params.document_starts, &out.buffer})) return;
  if (on_cuda(stream)) return cuda::head_norm_rope_forward(stream, params, in, out);
  const Rotation rotation(params);
  visit_float(kOp, in.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    const auto run = [&](auto weight) {
      head_norm_rope_forward_cpu(stream.threads(), in.tokens(), HeadRows<T>(in), weight, params.eps, rotation,
                                 HeadRows<T>(out));
    };
    params.weight.defined() ? run(Weighted<T>{params.weight.data<T>()}) : run(Weightless{});
  });
}

void head_norm_rope_backward(const Stream& stream, const HeadNormRope& params, const HeadView& d_out,
                             const HeadView& in, Write write, const HeadView& d_in, const Tensor& d_weight) {
  constexpr auto kOp = "head_norm_rope_backward";
  expect_params(kOp, params, in);
  expect_heads_like(kOp, "d_out", d_out, in);
  expect_heads_like(kOp, "d_in", d_in, in);
  INVAR_CHECK(params.weight.defined() == d_weight.defined(), "{}: a weight and its gradient come together", kOp);
  if (d_weight.defined()) expect_weight_rows(kOp, d_weight, in);
  if (!has_work(kOp, stream,
                {&d_out.buffer, &in.buffer, &params.weight, &params.document_starts, &d_in.buffer, &d_weight})) {
    return;
  }
  if (on_cuda(stream)) return cuda::head_norm_rope_backward(stream, params, d_out, in, write, d_in, d_weight);
  const Rotation rotation(params);
  visit_float(kOp, in.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    const auto run = [&](auto weight) {
      head_norm_rope_backward_cpu(stream.threads(), in.tokens(), HeadRows<T>(d_out), HeadRows<T>(in), weight,
                                  params.eps, rotation, write, HeadRows<T>(d_in), WeightRows(d_weight, in.tokens()));
    };
    params.weight.defined() ? run(Weighted<T>{params.weight.data<T>()}) : run(Weightless{});
  });
}

}  // namespace invar::ops
