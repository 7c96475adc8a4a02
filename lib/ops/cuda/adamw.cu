#include "ops/adamw_coefficients.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

// The formula of ops/adamw.cpp, operation by operation, so that both give the same bits. `value` may be null.
template <int N>
struct Update {
  struct Values {
    Pack<float, N> p, g, m, v;
  };
  __device__ void read(int64_t i, Values& values) const {
    values.p = load_pack<N>(p + i * N);
    values.g = load_pack<N>(g + i * N);
    values.m = load_pack<N>(m + i * N);
    values.v = load_pack<N>(v + i * N);
  }
  __device__ void write(int64_t i, Values& values) const {
    float out[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      update(values.p.element[k], values.g.element[k], values.m.element[k], values.v.element[k]);
      out[k] = values.p.element[k];
    }
    store_pack(p + i * N, values.p.element);
    store_pack(m + i * N, values.m.element);
    store_pack(v + i * N, values.v.element);
    if (value != nullptr) store_pack(value + i * N, out);
  }
  __device__ void update(float& parameter, float gradient, float& first, float& second) const {
    const float scaled = __fmul_rn(gradient, k.gradient_scale);
    first = __fmaf_rn(k.beta1, first, __fmul_rn(k.one_minus_beta1, scaled));
    second = __fmaf_rn(k.beta2, second, __fmul_rn(k.one_minus_beta2, __fmul_rn(scaled, scaled)));
    const float root = __fadd_rn(__fsqrt_rn(__fdiv_rn(second, k.correction2)), k.eps);
    const float direction = __fdiv_rn(__fdiv_rn(first, k.correction1), root);
    parameter = __fmaf_rn(-k.lr, __fmaf_rn(k.weight_decay, parameter, direction), parameter);
  }

  float* p;
  const float* g;
  float* m;
  float* v;
  __nv_bfloat16* value;
  AdamWCoefficients k;
};

}  // namespace

void adamw_update(const Stream& stream, const AdamWParams& params, const Tensor& parameter, const Tensor& gradient,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& value) {
  float* p = parameter.data<float>();
  const float* g = gradient.data<float>();
  float* m = exp_avg.data<float>();
  float* v = exp_avg_sq.data<float>();
  __nv_bfloat16* rounded = elements<BF16>(value);
  const bool aligned = is_aligned({p, g, m, v}) && is_aligned({rounded}, 8);
  for_packs<4>(aligned, parameter.numel(), [&](auto width, int64_t first, int64_t count) {
    __nv_bfloat16* const to = rounded == nullptr ? nullptr : rounded + first;
    const Update<width()> operation{p + first, g + first, m + first, v + first, to, AdamWCoefficients(params)};
    run_elementwise(stream, "adamw_update", count, operation);
  });
}

}  // namespace invar::ops::cuda
