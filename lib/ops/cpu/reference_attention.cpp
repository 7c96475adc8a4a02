#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/attention.h"
#include "ops/attention_check.h"

namespace invar::ops {
namespace {

// The heads of a view as doubles, (T, heads, D).
class Heads {
 public:
  explicit Heads(const HeadView& view)
      : heads_(view.heads()),
        head_dim_(view.head_dim),
        values_(static_cast<size_t>(view.tokens() * heads_ * head_dim_)) {
    INVAR_CHECK(
        view.offset + (view.groups - 1) * view.group_stride + view.heads_per_group * head_dim_ <= view.token_stride(),
        "heads end past the row of {}", view.buffer.describe());
  }

  double* at(int64_t token, int64_t head) { return values_.data() + (token * heads_ + head) * head_dim_; }
  const double* at(int64_t token, int64_t head) const { return values_.data() + (token * heads_ + head) * head_dim_; }

  // body(element of the view's buffer, the double that stands for it)
  template <class Body>
  void for_each(const HeadView& view, Body body) {
    for (int64_t token = 0; token < view.tokens(); ++token) {
      for (int64_t head = 0; head < heads_; ++head) {
        const int64_t first = view.index(token, head);
        for (int64_t d = 0; d < head_dim_; ++d) body(first + d, at(token, head)[d]);
      }
    }
  }

 private:
  int64_t heads_;
  int64_t head_dim_;
  std::vector<double> values_;
};

double widen(double element) {
  return element;
}
double widen(BF16 element) {
  return static_cast<double>(static_cast<float>(element));
}

template <class T>
T narrow(double value) {
  if constexpr (std::is_same_v<T, BF16>) {
    return BF16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class Body>
void with_elements(const Tensor& buffer, Body body) {
  switch (buffer.dtype()) {
    case DType::kF32:
      return body(buffer.data<float>());
    case DType::kBF16:
      return body(buffer.data<BF16>());
    case DType::kF64:
      return body(buffer.data<double>());
    default:
      INVAR_CHECK(false, "attention over {}", buffer.describe());
  }
}

Heads gather(const HeadView& view) {
  Heads heads(view);
  with_elements(view.buffer, [&](const auto* elements) {
    heads.for_each(view, [&](int64_t index, double& value) { value = widen(elements[index]); });
  });
  return heads;
}

void scatter(Heads& heads, const HeadView& view) {
  with_elements(view.buffer, [&]<class T>(T* elements) {
    heads.for_each(view, [&](int64_t index, double& value) { elements[index] = narrow<T>(value); });
  });
}

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(double factor, const double* from, double* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] += factor * from[i];
}

// One row of the softmax: the probabilities of the keys that a query sees, first_key ascending.
struct Row {
  int64_t first_key = 0;
  std::vector<double> probability;
  double lse = 0;
};

Row softmax_row(const AttentionParams& params, const HeadView& shape, const Heads& q, const Heads& k, int64_t token,
                int64_t head) {
  const int64_t sample_begin = token / params.sequence_length * params.sequence_length;
  Row row;
  row.first_key = params.window == 0 ? sample_begin : std::max(sample_begin, token - params.window + 1);
  if (params.document_starts.defined()) {
    row.first_key = std::max(row.first_key, sample_begin + params.document_starts.data<int32_t>()[token]);
  }
  double largest = -INFINITY;
  for (int64_t key = row.first_key; key <= token; ++key) {
    const double product = dot(q.at(token, head), k.at(key, head / shape.heads_per_group), shape.head_dim);
    row.probability.push_back(static_cast<double>(params.scale) * product);
    largest = std::max(largest, row.probability.back());
  }
  double sum = 0;
  for (double& p : row.probability) sum += p = std::exp(p - largest);
  for (double& p : row.probability) p /= sum;
  row.lse = largest + std::log(sum);
  return row;
}

class ReferenceAttention : public AttentionBackend {
 public:
  std::string name() const override { return "reference"; }
  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override;
  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override;
  // Recomputes the rows from q, k, v: takes nothing from out and lse, and leaves delta alone.
  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override;
};

std::string ReferenceAttention::refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const {
  return common_attention_refusal(params, q, k);
}

void ReferenceAttention::forward(const Stream&, const AttentionParams& params, const HeadView& q, const HeadView& k,
                                 const HeadView& v, const HeadView& out, const Tensor& lse) const {
  const Heads queries = gather(q), keys = gather(k), values = gather(v);
  Heads result(out);
  for (int64_t token = 0; token < q.tokens(); ++token) {
    for (int64_t head = 0; head < q.heads(); ++head) {
      const Row row = softmax_row(params, q, queries, keys, token, head);
      lse.data<float>()[token * q.heads() + head] = static_cast<float>(row.lse);
      for (size_t i = 0; i < row.probability.size(); ++i) {
        const int64_t key = row.first_key + static_cast<int64_t>(i);
        add_scaled(row.probability[i], values.at(key, head / q.heads_per_group), result.at(token, head), q.head_dim);
      }
    }
  }
  scatter(result, out);
}

// P = softmax(s), s = scale·QKᵀ:  dP = dO·Vᵀ,  ds = P∘(dP − rowsum(P∘dP)),  dQ = scale·ds·K,  dK = scale·dsᵀ·Q,
// dV = Pᵀ·dO, the last two summed over the query heads of the group.
void ReferenceAttention::backward(const Stream&, const AttentionParams& params, const HeadView& q, const HeadView& k,
                                  const HeadView& v, const HeadView&, const Tensor&, const HeadView& d_out,
                                  const Tensor&, const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const {
  const Heads queries = gather(q), keys = gather(k), values = gather(v), d_result = gather(d_out);
  Heads d_queries(d_q), d_keys(d_k), d_values(d_v);
  for (int64_t token = 0; token < q.tokens(); ++token) {
    for (int64_t head = 0; head < q.heads(); ++head) {
      const int64_t group = head / q.heads_per_group;
      const Row row = softmax_row(params, q, queries, keys, token, head);
      std::vector<double> d_probability;
      double row_sum = 0;
      for (size_t i = 0; i < row.probability.size(); ++i) {
        const int64_t key = row.first_key + static_cast<int64_t>(i);
        d_probability.push_back(dot(d_result.at(token, head), values.at(key, group), q.head_dim));
        row_sum += row.probability[i] * d_probability[i];
      }
      for (size_t i = 0; i < row.probability.size(); ++i) {
        const int64_t key = row.first_key + static_cast<int64_t>(i);
        const double d_score = static_cast<double>(params.scale) * row.probability[i] * (d_probability[i] - row_sum);
        add_scaled(d_score, keys.at(key, group), d_queries.at(token, head), q.head_dim);
        add_scaled(d_score, queries.at(token, head), d_keys.at(key, group), q.head_dim);
        add_scaled(row.probability[i], d_result.at(token, head), d_values.at(key, group), q.head_dim);
      }
    }
  }
  scatter(d_queries, d_q);
  scatter(d_keys, d_k);
  scatter(d_values, d_v);
}

}  // namespace

// Storage may also be f64, for finite differences.
const AttentionBackend& reference_attention() {
  static const ReferenceAttention reference;
  return reference;
}

}  // namespace invar::ops
