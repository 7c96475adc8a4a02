#include "optim/lr_schedule.h"

#include "support/catch.h"

using namespace invar;

namespace {

// Step k uses n = k − 1 finished steps.
double at(const ScheduleConfig& schedule, int64_t n, int64_t decay_steps = 100) {
  return learning_rate(schedule, 3e-4, decay_steps, n + 1);
}

ScheduleConfig cosine(int64_t warmup) {
  ScheduleConfig schedule;
  schedule.kind = ScheduleKind::kCosine;
  schedule.warmup_steps = warmup;
  schedule.min_lr = 3e-5;
  return schedule;
}

}  // namespace

TEST_CASE("cosine gives Megatron-LM's numbers") {
  const ScheduleConfig plain = cosine(0);
  CHECK(at(plain, 0) == Approx(3.000000e-4).epsilon(1e-6));
  CHECK(at(plain, 1) == Approx(2.999334e-4).epsilon(1e-6));
  CHECK(at(plain, 50) == Approx(1.650000e-4).epsilon(1e-6));
  CHECK(at(plain, 99) == Approx(3.006661e-5).epsilon(1e-6));
  CHECK(at(plain, 100) == Approx(3.000000e-5).epsilon(1e-6));
  const ScheduleConfig warm = cosine(10);
  CHECK(at(warm, 0) == 0.0);
  CHECK(at(warm, 5) == Approx(1.5e-4).epsilon(1e-6));
  CHECK(at(warm, 10) == Approx(3e-4).epsilon(1e-6));
  CHECK(at(warm, 11) == Approx(2.999178e-4).epsilon(1e-6));
  CHECK(at(warm, 55) == Approx(1.65e-4).epsilon(1e-6));
  CHECK(at(warm, 100) == Approx(3e-5).epsilon(1e-6));
}

TEST_CASE("constant, linear and wsd") {
  ScheduleConfig schedule;
  schedule.warmup_steps = 4;
  CHECK(at(schedule, 2) == Approx(1.5e-4));
  CHECK(at(schedule, 4) == Approx(3e-4));
  CHECK(at(schedule, 1000) == Approx(3e-4));

  schedule.kind = ScheduleKind::kLinear;
  schedule.warmup_steps = 0;
  schedule.min_lr = 1e-4;
  CHECK(at(schedule, 50) == Approx(2e-4));
  CHECK(at(schedule, 100) == Approx(1e-4));
  CHECK(at(schedule, 101) == Approx(1e-4));
  CHECK(at(schedule, 20, 40) == Approx(2e-4));
  CHECK(at(schedule, 41, 40) == Approx(1e-4));

  schedule.kind = ScheduleKind::kWsd;
  schedule.wsd_decay_steps = 20;
  CHECK(at(schedule, 80) == Approx(3e-4));
  CHECK(at(schedule, 90) == Approx(2e-4));
  CHECK(at(schedule, 100) == Approx(1e-4));
}
