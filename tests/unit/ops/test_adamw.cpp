#include "host_tensor.h"
#include "ops/adamw.h"
#include "ops/adamw_coefficients.h"
#include "ops/cpu/parallel.h"

namespace invar::ops {
namespace {

using namespace invar::test;

struct State {
  explicit State(int64_t n)
      : parameter(random_tensor(DType::kF32, {n}, 1)),
        gradient(random_tensor(DType::kF32, {n}, 2)),
        exp_avg(random_tensor(DType::kF32, {n}, 3, 0.1)),
        exp_avg_sq(random_tensor(DType::kF32, {n}, 4, 0.1, 0.1)) {}

  void update(const Stream& stream, const AdamWParams& params, int64_t begin, int64_t end) const {
    adamw_update(stream, params, parameter.tensor().rows(begin, end), gradient.tensor().rows(begin, end),
                 exp_avg.tensor().rows(begin, end), exp_avg_sq.tensor().rows(begin, end));
  }
  bool same_bits(const State& other) const {
    return parameter.same_bits(other.parameter) && exp_avg.same_bits(other.exp_avg) &&
           exp_avg_sq.same_bits(other.exp_avg_sq);
  }

  HostTensor parameter, gradient, exp_avg, exp_avg_sq;
};

AdamWParams recipe() {
  AdamWParams params;
  params.lr = 0.05f;
  params.beta1 = 0.9f;
  params.beta2 = 0.95f;
  params.eps = 0.02f;  // large, so that its place outside the square root shows
  params.weight_decay = 0.1f;
  params.gradient_scale = 0.7f;
  return params;
}

TEST_CASE("adamw_update follows the fp64 formula over five steps") {
  AdamWParams params = recipe();
  State state(37);
  Values p = state.parameter.values(), m = state.exp_avg.values(), v = state.exp_avg_sq.values();
  for (params.step = 1; params.step <= 5; ++params.step) {
    const auto b1 = static_cast<double>(params.beta1), b2 = static_cast<double>(params.beta2);
    const double bc1 = 1 - std::pow(b1, params.step), bc2 = 1 - std::pow(b2, params.step);
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = state.gradient[i] * static_cast<double>(params.gradient_scale);
      m[i] = b1 * m[i] + (1 - b1) * g;
      v[i] = b2 * v[i] + (1 - b2) * g * g;
      const double direction = (m[i] / bc1) / (std::sqrt(v[i] / bc2) + static_cast<double>(params.eps));
      p[i] -= static_cast<double>(params.lr) * (direction + static_cast<double>(params.weight_decay) * p[i]);
    }
    state.update(kCpu, params, 0, 37);
    require_close(state.exp_avg.values(), m, 1e-6, 1e-7);
    require_close(state.exp_avg_sq.values(), v, 1e-6, 1e-7);
    require_close(state.parameter.values(), p, 1e-6, 1e-6);
  }
}

TEST_CASE("bias corrections are those of the math library") {
  int64_t others = 0;
  for (const float beta : {0.0f, 0.9f, 0.95f, 0.98f, 0.99f, 0.999f, 0.9999f}) {
    for (int64_t step = 1; step <= 100000; ++step) {
      const double power = std::pow(static_cast<double>(beta), static_cast<double>(step));
      others += AdamWCoefficients::bias_correction(beta, step) != static_cast<float>(1.0 - power);
    }
  }
  CHECK(others <= 2);
}

TEST_CASE("the first step from zero moments moves by lr in the direction of the gradient") {
  AdamWParams params;
  params.lr = 0.125f;
  const HostTensor parameter(DType::kF32, {3}, {1, 1, 1}), gradient(DType::kF32, {3}, {1e-3, -40, 0});
  const HostTensor exp_avg(DType::kF32, {3}, {0, 0, 0}), exp_avg_sq = exp_avg;
  adamw_update(kCpu, params, parameter, gradient, exp_avg, exp_avg_sq);
  require_close(parameter.values(), {0.875, 1.125, 1.0}, 2e-6, 0);
}

TEST_CASE("bits do not depend on where a shard begins, nor on threads") {
  const int64_t n = 1003;
  const AdamWParams params = recipe();
  const State whole(n);
  whole.update(kCpu, params, 0, n);
  for (const int64_t cut : {1, 3, 7, 8, 13, 500, 997, 1002}) {
    const State parts(n);
    parts.update(kCpu, params, 0, cut);
    parts.update(kCpu, params, cut, n);
    CHECK(parts.same_bits(whole));
  }
  const State one_by_one(n);
  for (int64_t i = 0; i < n; ++i) one_by_one.update(kCpu, params, i, i + 1);
  CHECK(one_by_one.same_bits(whole));
  CHECK_FALSE(State(n).same_bits(whole));

  const int64_t many = cpu::kMinWorkPerThread + 7;
  const State one(many), two(many);
  one.update(kCpu, params, 0, many);
  two.update(kTwoThreads, params, 0, many);
  CHECK(two.same_bits(one));
}

TEST_CASE("adamw_update of nothing, on meta, and of wrong operands") {
  const State state(5);
  const State before(5);
  state.update(kCpu, recipe(), 2, 2);
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  adamw_update(kMeta, recipe(), meta(state.parameter), meta(state.gradient), meta(state.exp_avg),
               meta(state.exp_avg_sq));
  CHECK(state.same_bits(before));

  const HostTensor bf16(DType::kBF16, {5}), longer(DType::kF32, {6});
  const auto update = [&](const AdamWParams& params, const Tensor& gradient) {
    return message_of(ErrorKind::kFault,
                      [&] { adamw_update(kCpu, params, state.parameter, gradient, state.exp_avg, state.exp_avg_sq); });
  };
  AdamWParams step_zero = recipe();
  step_zero.step = 0;
  CHECK(contains(update(recipe(), bf16), "adamw_update: bf16 (5) beside a parameter of f32 (5)"));
  CHECK(contains(update(recipe(), longer), "adamw_update: f32 (6) beside a parameter of f32 (5)"));
  CHECK(contains(update(step_zero, state.gradient), "step 0"));
}

}  // namespace
}  // namespace invar::ops
