#pragma once

#include "device/stream.h"

namespace invar::ops {

struct AdamWParams {
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0;
  float gradient_scale = 1;  // clip coefficient
  int64_t step = 1;          // 1 for the first update; bias corrections 1 − beta^step in double
};

// Decoupled AdamW on n elements, f32: g = gradient·gradient_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²;
// p −= lr·((m/bc1) / (√(v/bc2) + eps) + weight_decay·p). One scalar formula with explicit fma: bits do not depend on
// where a shard begins. `value`, if defined, bf16 of the same size, gets the new parameter rounded.
void adamw_update(const Stream& stream, const AdamWParams& params, const Tensor& parameter, const Tensor& gradient,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& value = {});

}  // namespace invar::ops
