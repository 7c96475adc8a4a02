#pragma once

#include "core/elementary.h"
#include "ops/adamw.h"

namespace invar::ops {

// The constants of one step, as the elements see them.
struct AdamWCoefficients {
  explicit AdamWCoefficients(const AdamWParams& params)
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
    return static_cast<float>(1.0 - elementary::pow(static_cast<double>(beta), static_cast<double>(step)));
  }

  float beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2;
  float eps, lr, weight_decay, gradient_scale;
};

}  // namespace invar::ops
