#include "ops/adamw.h"

#include <cmath>

#include "ops/adamw_coefficients.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"

namespace invar::ops {

namespace {

inline void update_element(const AdamWCoefficients& k, float& p, float gradient, float& m, float& v) {
  const float g = gradient * k.gradient_scale;
  m = std::fma(k.beta1, m, k.one_minus_beta1 * g);
  v = std::fma(k.beta2, v, k.one_minus_beta2 * (g * g));
  const float direction = (m / k.correction1) / (std::sqrt(v / k.correction2) + k.eps);
  p = std::fma(-k.lr, std::fma(k.weight_decay, p, direction), p);
}

}  // namespace

void adamw_update(const Stream& stream, const AdamWParams& params, const Tensor& parameter, const Tensor& gradient,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& value) {
  constexpr auto kOp = "adamw_update";
  const int64_t n = parameter.numel();
  for (const Tensor* tensor : {&parameter, &gradient, &exp_avg, &exp_avg_sq}) {
    INVAR_CHECK(tensor->dtype() == DType::kF32 && tensor->numel() == n, "{}: {} beside a parameter of {}", kOp,
                tensor->describe(), parameter.describe());
  }
  INVAR_CHECK(params.step >= 1, "{}: step {} (the first is 1)", kOp, params.step);
  if (value.defined()) expect(kOp, "value", value, DType::kBF16, {n});
  if (!has_work(kOp, stream, {&parameter, &gradient, &exp_avg, &exp_avg_sq, &value})) return;
  if (on_cuda(stream)) return cuda::adamw_update(stream, params, parameter, gradient, exp_avg, exp_avg_sq, value);
  const AdamWCoefficients coefficients(params);
  float* p = parameter.data<float>();
  const float* g = gradient.data<float>();
  float* m = exp_avg.data<float>();
  float* v = exp_avg_sq.data<float>();
  cpu::parallel_for(stream.threads(), n, 4, [=](Range range) {
#pragma omp simd
    for (int64_t i = range.begin; i < range.end; ++i) update_element(coefficients, p[i], g[i], m[i], v[i]);
  });
  if (value.defined()) copy(stream, parameter, value);
}

}  // namespace invar::ops
