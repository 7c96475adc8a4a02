#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/elementary.h"
#include "ops/cpu/element.h"
#include "ops/cpu/exp_block.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::store;

// The columns of a chunk of logits that are tokens, not padding.
struct Columns {
  Columns(const Tensor& logits, Range columns, Range vocabulary, int64_t vocabulary_size)
      : width(logits.dim(1)),
        begin(columns.begin),
        tokens(intersect({vocabulary.begin + columns.begin, vocabulary.begin + columns.end}, {0, vocabulary_size})),
        first(vocabulary.begin + columns.begin) {}

  int64_t count() const { return tokens.size(); }
  // The label's column, counted from the first of these; -1 where it is masked or elsewhere.
  int64_t of(int32_t label) const { return tokens.contains(label) ? label - first : -1; }

  int64_t width;  // of a row
  int64_t begin;  // in a row
  Range tokens;
  int64_t first;  // token of the first
};

void statistics_cpu(int threads, int64_t n, Columns columns, const float* logits, const int32_t* labels, float* maximum,
                    float* sum, float* target) {
  cpu::parallel_for(threads, n, columns.count(), [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const float* row = logits + t * columns.width + columns.begin;
      const float peak = cpu::lane_max(columns.count(), row);
      maximum[t] = peak;
      double total = 0;
      const auto exponent = [=](int64_t c) { return row[c] - peak; };
      cpu::for_exp_blocks(columns.count(), exponent, [&](int64_t, int64_t count, const float* e) {
        total += static_cast<double>(cpu::lane_sum(count, [=](int64_t i, float part) { return part + e[i]; }));
      });
      sum[t] = static_cast<float>(total);
      const int64_t column = columns.of(labels[t]);
      target[t] = column < 0 ? 0.0f : row[column];
    }
  });
}

template <class T>
void gradient_cpu(int threads, int64_t n, Columns columns, const float* logits, const int32_t* labels,
                  const float* maximum, const float* sum, float scale, float cap, T* d_logits) {
  const bool capped = cap > 0;
  const float inverse_cap = capped ? 1.0f / cap : 0.0f;
  cpu::parallel_for(threads, n, columns.width, [=](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const float* row = logits + t * columns.width;
      T* d_row = d_logits + t * columns.width;
      const int64_t count = labels[t] < 0 ? 0 : columns.count();
      const int64_t column = columns.of(labels[t]);
      const float peak = maximum[t];
      const float total = sum[t];
      const auto exponent = [=](int64_t c) { return row[c] - peak; };
      cpu::for_exp_blocks(count, exponent, [=](int64_t first, int64_t size, const float* e) {
        const auto slope = [=](int64_t c) {                          // of the softcap; 1 without one
          const float share = capped ? row[c] * inverse_cap : 0.0f;  // a logit of −inf too
          return std::fma(-share, share, 1.0f) * scale;
        };
        const int64_t i = column - first;
        const bool hit = 0 <= i && i < size;
        const float d_target = hit ? (e[i] / total - 1.0f) * slope(column) : 0.0f;
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) store(d_row[first + j], e[j] / total * slope(first + j));
        if (hit) store(d_row[column], d_target);
      });
      std::fill(d_row + count, d_row + columns.width, T{});
    }
  });
}

// x / cap, not x · (1/cap): as Hugging Face rounds it.
void softcap_cpu(int64_t n, float cap, float* x) {
  const cpu::Float8 bound = cpu::broadcast(cap);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) cpu::store8(x + i, bound * cpu::tanh(cpu::load8(x + i) / bound));
  if (i == n) return;
  const auto bytes = static_cast<size_t>(n - i) * sizeof(float);
  cpu::Float8 rest{};
  std::memcpy(&rest, x + i, bytes);
  rest = bound * cpu::tanh(rest / bound);
  std::memcpy(x + i, &rest, bytes);
}

void expect_logits(std::string_view op, const Tensor& logits, Range vocabulary) {
  INVAR_CHECK(logits.dims() == 2, "{}: logits is {}, expected 2 dims", op, logits.describe());
  expect(op, "logits", logits, DType::kF32, {logits.dim(0), vocabulary.size()});
}

}  // namespace

void softcap(const Stream& stream, float cap, const Tensor& logits) {
  constexpr auto kOp = "softcap";
  INVAR_CHECK(cap > 0, "{}: cap {}", kOp, cap);
  expect(kOp, "logits", logits, DType::kF32, {logits.dim(0), logits.dim(1)});
  if (!has_work(kOp, stream, {&logits})) return;
  if (on_cuda(stream)) return cuda::softcap(stream, cap, logits);
  float* x = logits.data<float>();
  cpu::parallel_for(stream.threads(), logits.numel(), 1,
                    [=](Range range) { softcap_cpu(range.size(), cap, x + range.begin); });
}

void logits_statistics(const Stream& stream, const Tensor& logits, Range columns, const Tensor& labels,
                       Range vocabulary, int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum,
                       const Tensor& target) {
  constexpr auto kOp = "logits_statistics";
  expect_logits(kOp, logits, vocabulary);
  INVAR_CHECK(0 <= columns.begin && columns.begin <= columns.end && columns.end <= logits.dim(1),
              "{}: columns [{}, {}) of {}", kOp, columns.begin, columns.end, logits.describe());
  const int64_t n = logits.dim(0);
  expect(kOp, "labels", labels, DType::kI32, {n});
  expect(kOp, "maximum", maximum, DType::kF32, {n});
  expect(kOp, "sum", sum, DType::kF32, {n});
  expect(kOp, "target", target, DType::kF32, {n});
  if (!has_work(kOp, stream, {&logits, &labels, &maximum, &sum, &target})) return;
  if (on_cuda(stream)) {
    return cuda::logits_statistics(stream, logits, columns, labels, vocabulary, vocabulary_size, maximum, sum, target);
  }
  statistics_cpu(stream.threads(), n, Columns(logits, columns, vocabulary, vocabulary_size), logits.data<float>(),
                 labels.data<int32_t>(), maximum.data<float>(), sum.data<float>(), target.data<float>());
}

void rescale_sum_exp(const Stream& stream, const Tensor& own_maximum, const Tensor& maximum, const Tensor& sum) {
  constexpr auto kOp = "rescale_sum_exp";
  INVAR_CHECK(sum.dims() == 1, "{}: sum is {}, expected 1 dim", kOp, sum.describe());
  const int64_t n = sum.dim(0);
  expect(kOp, "own_maximum", own_maximum, DType::kF32, {n});
  expect(kOp, "maximum", maximum, DType::kF32, {n});
  expect(kOp, "sum", sum, DType::kF32, {n});
  if (!has_work(kOp, stream, {&own_maximum, &maximum, &sum})) return;
  if (on_cuda(stream)) return cuda::rescale_sum_exp(stream, own_maximum, maximum, sum);
  const float* own = own_maximum.data<float>();
  const float* peak = maximum.data<float>();
  float* out = sum.data<float>();
  for (int64_t t = 0; t < n; ++t) {  // few, beside the logits
    const double factor = elementary::exp(static_cast<double>(own[t]) - static_cast<double>(peak[t]));
    out[t] = out[t] == 0.0f ? 0.0f : static_cast<float>(static_cast<double>(out[t]) * factor);
  }
}

void token_losses(const Stream& stream, const Tensor& labels, const Tensor& maximum, const Tensor& sum,
                  const Tensor& target, const Tensor& losses) {
  constexpr auto kOp = "token_losses";
  INVAR_CHECK(losses.dims() == 1, "{}: losses is {}, expected 1 dim", kOp, losses.describe());
  const int64_t n = losses.dim(0);
  expect(kOp, "labels", labels, DType::kI32, {n});
  expect(kOp, "maximum", maximum, DType::kF32, {n});
  expect(kOp, "sum", sum, DType::kF32, {n});
  expect(kOp, "target", target, DType::kF32, {n});
  expect(kOp, "losses", losses, DType::kF32, {n});
  if (!has_work(kOp, stream, {&labels, &maximum, &sum, &target, &losses})) return;
  if (on_cuda(stream)) return cuda::token_losses(stream, labels, maximum, sum, target, losses);
  const int32_t* label = labels.data<int32_t>();
  const float* peak = maximum.data<float>();
  const float* total = sum.data<float>();
  const float* hit = target.data<float>();
  float* out = losses.data<float>();
  for (int64_t t = 0; t < n; ++t) {  // few, beside the logits: fp64, so that two large logits cancel without loss
    const double log_sum = static_cast<double>(cpu::log(total[t])) + static_cast<double>(peak[t]);
    out[t] = label[t] < 0 ? 0.0f : static_cast<float>(log_sum - static_cast<double>(hit[t]));
  }
}

void logits_gradient(const Stream& stream, const Tensor& logits, const Tensor& labels, Range vocabulary,
                     int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum, float scale, float cap,
                     const Tensor& d_logits) {
  constexpr auto kOp = "logits_gradient";
  expect_logits(kOp, logits, vocabulary);
  expect_float(kOp, "d_logits", d_logits, 2);
  const int64_t n = logits.dim(0);
  expect(kOp, "labels", labels, DType::kI32, {n});
  expect(kOp, "maximum", maximum, DType::kF32, {n});
  expect(kOp, "sum", sum, DType::kF32, {n});
  expect(kOp, "d_logits", d_logits, d_logits.dtype(), {n, logits.dim(1)});
  if (!has_work(kOp, stream, {&logits, &labels, &maximum, &sum, &d_logits})) return;
  if (on_cuda(stream))
    return cuda::logits_gradient(stream, logits, labels, vocabulary, vocabulary_size, maximum, sum, scale, cap,
                                 d_logits);
  visit_float(kOp, d_logits.dtype(), [&]<class T>(std::type_identity<T>) {
    gradient_cpu(stream.threads(), n, Columns(logits, {0, logits.dim(1)}, vocabulary, vocabulary_size),
                 logits.data<float>(), labels.data<int32_t>(), maximum.data<float>(), sum.data<float>(), scale, cap,
                 d_logits.data<T>());
  });
}

}  // namespace invar::ops
