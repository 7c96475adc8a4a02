#include "like_cpu.h"
#include "ops/adamw.h"

namespace invar::ops {
namespace {

using namespace invar::test;

struct State {
  explicit State(int64_t n)
      : parameter(random_tensor(DType::kF32, {n}, 1)),
        gradient(random_tensor(DType::kF32, {n}, 2)),
        exp_avg(random_tensor(DType::kF32, {n}, 3, 0.1)),
        exp_avg_sq(random_tensor(DType::kF32, {n}, 4, 0.1, 0.1)),
        value(DType::kBF16, {n}) {}

  HostTensor parameter, gradient, exp_avg, exp_avg_sq, value;
};

struct DeviceState {
  explicit DeviceState(const State& state)
      : parameter(state.parameter),
        gradient(state.gradient),
        exp_avg(state.exp_avg),
        exp_avg_sq(state.exp_avg_sq),
        value(state.value) {}

  void update(const AdamWParams& params, int64_t begin, int64_t end, bool with_value) const {
    adamw_update(gpu(), params, parameter.tensor().rows(begin, end), gradient.tensor().rows(begin, end),
                 exp_avg.tensor().rows(begin, end), exp_avg_sq.tensor().rows(begin, end),
                 with_value ? value.tensor().rows(begin, end) : Tensor());
  }
  void check_same_bits(const State& state) const {
    CHECK(parameter.host().same_bits(state.parameter));
    CHECK(exp_avg.host().same_bits(state.exp_avg));
    CHECK(exp_avg_sq.host().same_bits(state.exp_avg_sq));
    CHECK(value.host().same_bits(state.value));
  }

  DeviceTensor parameter, gradient, exp_avg, exp_avg_sq, value;
};

TEST_CASE("adamw_update on the GPU gives the CPU's bits, wherever shards begin") {
  const int64_t n = GENERATE(0, 1, 5, 1023, 1024, 100003);
  const bool with_value = GENERATE(true, false);
  AdamWParams params;
  params.lr = 0.05f;
  params.beta2 = 0.95f;
  params.weight_decay = 0.1f;
  params.gradient_scale = 0.7f;
  const State state(n);
  const DeviceState whole(state), sharded(state);
  const int64_t cut = n / 3 | (n > 1 ? 1 : 0);
  for (params.step = 1; params.step <= 3; ++params.step) {
    adamw_update(kCpu, params, state.parameter, state.gradient, state.exp_avg, state.exp_avg_sq,
                 with_value ? state.value.tensor() : Tensor());
    whole.update(params, 0, n, with_value);
    sharded.update(params, 0, cut, with_value);
    sharded.update(params, cut, n, with_value);
  }
  whole.check_same_bits(state);
  sharded.check_same_bits(state);
}

}  // namespace
}  // namespace invar::ops
