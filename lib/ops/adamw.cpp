#include "ops/adamw.h"

#include <cmath>

#include "ops/cpu/parallel.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

// The constants of one step, as the elements see them.
struct Coefficients {
  explicit Coefficients(const AdamWParams& params)
      : beta1(params.beta1),
        beta2(params.beta2),
        one_minus_beta1(1.0f - params.beta1),
        one_minus_beta2(1.0f - params.beta2),
        correction1(bias_correction(params.beta1, params.step)),
        correction2(bias_correction(params.beta2, params.step)),
        eps(params.eps),
        lr(params.lr),
        weight_decay(params.weight_decay),
        gradient_scale(params.gradient_scale) {}

  static float bias_correction(float beta, int64_t step) {
    return static_cast<float>(1.0 - std::pow(static_cast<double>(beta), static_cast<double>(step)));
  }

  float beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2;
  float eps, lr, weight_decay, gradient_scale;
};

inline void update_element(const Coefficients& k, float& p, float gradient, float& m, float& v) {
  const float g = gradient * k.gradient_scale;
  m = std::fma(k.beta1, m, k.one_minus_beta1 * g);
  v = std::fma(k.beta2, v, k.one_minus_beta2 * (g * g));
  const float direction = (m / k.correction1) / (std::sqrt(v / k.correction2) + k.eps);
  p = std::fma(-k.lr, std::fma(k.weight_decay, p, direction), p);
}

}  // namespace

void adamw_update(const Stream& stream, const AdamWParams& params, const Tensor& parameter, const Tensor& gradient,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq) {
  constexpr auto kOp = "adamw_update";
  const int64_t n = parameter.numel();
  for (const Tensor* tensor : {&parameter, &gradient, &exp_avg, &exp_avg_sq}) {
    INVAR_CHECK(tensor->dtype() == DType::kF32 && tensor->numel() == n, "{}: {} beside a parameter of {}", kOp,
                tensor->describe(), parameter.describe());
  }
  INVAR_CHECK(params.step >= 1, "{}: step {} (the first is 1)", kOp, params.step);
  if (!runs_on_cpu(kOp, stream, {&parameter, &gradient, &exp_avg, &exp_avg_sq})) return;
  const Coefficients coefficients(params);
  float* p = parameter.data<float>();
  const float* g = gradient.data<float>();
  float* m = exp_avg.data<float>();
  float* v = exp_avg_sq.data<float>();
  cpu::parallel_for(stream.threads(), n, 4, [=](Range range) {
#pragma omp simd
    for (int64_t i = range.begin; i < range.end; ++i) update_element(coefficients, p[i], g[i], m[i], v[i]);
  });
}

}  // namespace invar::ops
