#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "host_tensor.h"
#include "ops/attention.h"

namespace invar::test {

struct AttentionShape {
  int64_t samples = 1;
  int64_t sequence = 1;
  int64_t groups = 1;
  int64_t heads_per_group = 1;
  int64_t head_dim = 1;
  int64_t window = 0;

  int64_t tokens() const { return samples * sequence; }
};

// Views of the operands of one call; any part of an AttentionCase.
struct AttentionOperands {
  ops::AttentionParams params;
  ops::HeadView q, k, v, out, d_out, d_q, d_k, d_v;

  std::vector<ops::HeadView*> views() { return {&q, &k, &v, &out, &d_out, &d_q, &d_k, &d_v}; }

  AttentionOperands group(int64_t index) const {
    AttentionOperands part = *this;
    for (ops::HeadView* view : part.views()) {
      view->groups = 1;
      view->offset += index * view->group_stride;
    }
    return part;
  }
  // One query head of each group.
  AttentionOperands query_head(int64_t index) const {
    AttentionOperands part = *this;
    for (ops::HeadView* view : {&part.q, &part.out, &part.d_out, &part.d_q}) {
      view->heads_per_group = 1;
      view->offset += index * view->head_dim;
    }
    return part;
  }
  AttentionOperands sample(int64_t index) const {
    AttentionOperands part = *this;
    for (ops::HeadView* view : part.views()) {
      view->buffer = view->buffer.rows(index * params.sequence_length, (index + 1) * params.sequence_length);
    }
    return part;
  }
  // All groups see the keys and values of the first one.
  AttentionOperands on_first_keys() const {
    AttentionOperands part = *this;
    part.k.group_stride = 0;
    part.v.group_stride = 0;
    return part;
  }
  // Tokens [begin, end) as a sample of one document.
  AttentionOperands alone(int64_t begin, int64_t end) const {
    AttentionOperands part = *this;
    for (ops::HeadView* view : part.views()) view->buffer = view->buffer.rows(begin, end);
    part.params.sequence_length = end - begin;
    part.params.document_starts = Tensor();
    return part;
  }
};

// The operands in memory, as a layer holds them: q, k, v in one buffer of rows [q heads, k, v] per group with some
// unused elements at the end of a row, and their gradients in another. Outputs are NaN until written.
class AttentionCase : public AttentionOperands {
 public:
  static constexpr int64_t kUnused = 3;

  AttentionCase(const AttentionShape& shape, DType dtype, unsigned seed = 1, int64_t unused = kUnused)
      : unused_(unused) {
    const int64_t heads = shape.groups * shape.heads_per_group;
    const int64_t group_stride = (shape.heads_per_group + 2) * shape.head_dim;
    const int64_t row = shape.groups * group_stride + unused;
    params = {shape.sequence, static_cast<float>(1.5 / std::sqrt(static_cast<double>(shape.head_dim))), shape.window,
              Tensor()};
    for (int64_t width : {row, row, heads * shape.head_dim, heads * shape.head_dim}) {
      storage_.emplace_back(static_cast<size_t>(shape.tokens() * width * size_of(dtype)), std::byte{0xff});
      buffers_.push_back(Tensor(storage_.back().data(), dtype, DeviceType::kCpu, {shape.tokens(), width}));
    }
    const auto view = [&](size_t buffer, int64_t heads_per_group, int64_t stride, int64_t first_head) {
      return ops::HeadView{buffers_[buffer], shape.groups, heads_per_group,
                           shape.head_dim,   stride,       first_head * shape.head_dim};
    };
    const int64_t g = shape.heads_per_group;
    q = view(0, g, group_stride, 0);
    k = view(0, 1, group_stride, g);
    v = view(0, 1, group_stride, g + 1);
    d_q = view(1, g, group_stride, 0);
    d_k = view(1, 1, group_stride, g);
    d_v = view(1, 1, group_stride, g + 1);
    out = view(2, g, g * shape.head_dim, 0);
    d_out = view(3, g, g * shape.head_dim, 0);
    for (const ops::HeadView* input : {&q, &k, &v, &d_out}) write(*input, random_values(count(*input), seed++, 2.0));
  }
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  // What the views are views of.
  const std::vector<Tensor>& buffers() const { return buffers_; }

  static int64_t count(const ops::HeadView& view) { return view.tokens() * view.heads() * view.head_dim; }

  // The view's elements in the order (T, heads, D).
  static std::vector<double> read(const ops::HeadView& view) {
    std::vector<double> values;
    for_each_element(view, [&](int64_t index) { values.push_back(element(view.buffer, index)); });
    return values;
  }

  static void write(const ops::HeadView& view, const std::vector<double>& values) {
    size_t next = 0;
    for_each_element(view, [&](int64_t index) { set_element(view.buffer, index, values[next++]); });
  }

  // Gives all groups the keys and values of the first one.
  void repeat_first_keys() const {
    for (const ops::HeadView* view : {&k, &v}) {
      ops::HeadView first = *view;
      first.group_stride = 0;
      write(*view, read(first));
    }
  }

  // Nothing was written beyond the heads of the gradients.
  bool unused_untouched() const {
    const Tensor& gradients = buffers_[1];
    const auto* bytes = static_cast<const unsigned char*>(gradients.raw());
    const int64_t row = gradients.dim(1) * size_of(gradients.dtype());
    const int64_t unused = unused_ * size_of(gradients.dtype());
    for (int64_t token = 1; token <= gradients.dim(0); ++token) {
      for (int64_t i = 1; i <= unused; ++i) {
        if (bytes[token * row - i] != 0xff) return false;
      }
    }
    return true;
  }

 private:
  template <class Body>
  static void for_each_element(const ops::HeadView& view, Body body) {
    for (int64_t token = 0; token < view.tokens(); ++token) {
      for (int64_t group = 0; group < view.groups; ++group) {
        for (int64_t i = 0; i < view.heads_per_group * view.head_dim; ++i) {
          body(token * view.token_stride() + group * view.group_stride + view.offset + i);
        }
      }
    }
  }

  static double element(const Tensor& buffer, int64_t index) {
    if (buffer.dtype() == DType::kF64) return buffer.data<double>()[index];
    if (buffer.dtype() == DType::kF32) return static_cast<double>(buffer.data<float>()[index]);
    return static_cast<double>(static_cast<float>(buffer.data<BF16>()[index]));
  }
  static void set_element(const Tensor& buffer, int64_t index, double value) {
    if (buffer.dtype() == DType::kF64) {
      buffer.data<double>()[index] = value;
    } else if (buffer.dtype() == DType::kF32) {
      buffer.data<float>()[index] = static_cast<float>(value);
    } else {
      buffer.data<BF16>()[index] = BF16(static_cast<float>(value));
    }
  }

  int64_t unused_;
  std::vector<std::vector<std::byte>> storage_;
  std::vector<Tensor> buffers_;
};

// What a call computed, as (T, heads, D), and lse (T, heads).
struct AttentionResult {
  std::vector<double> out, lse, d_q, d_k, d_v;
};

inline AttentionResult run_attention(const ops::AttentionBackend& backend, const AttentionOperands& o,
                                     int threads = 1) {
  const Stream stream(DeviceType::kCpu, threads);
  HostTensor lse(DType::kF32, {o.q.tokens(), o.q.heads()});
  HostTensor delta(DType::kF32, {o.q.tokens(), o.q.heads()});
  backend.forward(stream, o.params, o.q, o.k, o.v, o.out, lse);
  backend.backward(stream, o.params, o.q, o.k, o.v, o.out, lse, o.d_out, delta, o.d_q, o.d_k, o.d_v);
  return {AttentionCase::read(o.out), lse.values(), AttentionCase::read(o.d_q), AttentionCase::read(o.d_k),
          AttentionCase::read(o.d_v)};
}

inline const ops::AttentionBackend& tiled() {
  const AttentionCase any({}, DType::kF32);
  const ops::AttentionBackend& backend = ops::choose_attention(DeviceType::kCpu, any.params, any.q, any.k);
  REQUIRE(backend.name() == "tiled");
  return backend;
}

// Largest error over largest expected value; infinite if anything is not a number.
inline double error_of(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    error = std::max(error, std::abs(actual[i] - expected[i]));
    size = std::max(size, std::abs(expected[i]));
  }
  return error == 0 ? 0 : error / size;
}

inline double worst_error(const AttentionResult& actual, const AttentionResult& expected) {
  // A sample of one token has no gradient to q and k but what rounding leaves: measured against d_v.
  const auto gradient_error = [&](const std::vector<double>& a, const std::vector<double>& e) {
    double size = 0;
    for (double value : e) size = std::max(size, std::abs(value));
    if (size > 1e-12) return error_of(a, e);
    double error = 0;
    for (double value : a) error = std::isfinite(value) ? std::max(error, std::abs(value)) : INFINITY;
    return error;
  };
  return std::max({error_of(actual.out, expected.out), error_of(actual.lse, expected.lse),
                   gradient_error(actual.d_q, expected.d_q), gradient_error(actual.d_k, expected.d_k),
                   error_of(actual.d_v, expected.d_v)});
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

inline bool same_bits(const AttentionResult& a, const AttentionResult& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.d_q, b.d_q) && same_bits(a.d_k, b.d_k) &&
         same_bits(a.d_v, b.d_v);
}

}  // namespace invar::test
