#include "config/measured_speeds.h"

#include <random>

#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

using Samples = std::vector<int64_t>;
using Speeds = std::vector<double>;

// A slot of each of two replicas is lost, a third one is whole; they share 24 samples by these speeds.
Config damaged(const Speeds& speeds) {
  Config config = valid_config();
  config.parallel.tensor = 4;
  config.parallel.data = 3;
  config.parallel.nonuniform.failed = {"dp0.tp1", "dp2.tp1"};
  config.parallel.nonuniform.speeds = speeds;
  config.train.global_batch_size = 24;
  return config;
}

MeasuredSpeeds measured(const Config& config, const Speeds& seconds) {
  return measured_speeds(config, plan_replicas(config, 12), seconds);
}

}  // namespace

TEST_CASE("measured speeds are samples per second, relative to the fastest replica") {
  const Config config = damaged({1, 1, 1});
  const MeasuredSpeeds speeds = measured(config, {0.2, 0.1, 0.3});
  CHECK(speeds.speeds == Speeds{0.5, 1, 0.333});
  CHECK(speeds.now.samples == Samples{8, 8, 8});
  CHECK(speeds.now.seconds == 0.3);
  CHECK(speeds.then.samples == Samples{7, 13, 4});
  CHECK(speeds.then.seconds == Approx(0.2 * 7 / 8));
  CHECK(speeds.far_from_shares());
  CHECK(speeds.describe() ==
        "parallel.nonuniform.speeds=[0.5, 1, 0.333] shares the batch 7, 13, 4 instead of 8, 8, 8 samples: the longest "
        "work of a step takes 0.175 s instead of 0.3 s");

  // Unequal shares: half the samples in half the time is the same speed.
  const MeasuredSpeeds unequal = measured(damaged({1, 2, 1}), {0.1, 0.2, 0.1});
  CHECK(unequal.now.samples == Samples{6, 12, 6});
  CHECK(unequal.speeds == Speeds{1, 1, 1});
  CHECK(unequal.then.samples == Samples{8, 8, 8});
}

TEST_CASE("speeds of which the shares are the right ones change nothing") {
  const MeasuredSpeeds speeds = measured(damaged({0.5, 1, 0.5}), {1.2, 1.21, 1.19});
  CHECK(speeds.then.samples == Samples{6, 12, 6});
  CHECK_FALSE(speeds.far_from_shares());
  CHECK(speeds.describe() ==
        "parallel.nonuniform.speeds=[0.504, 1, 0.508] shares the batch as it is, 6, 12, 6 samples: the longest work "
        "of a step takes 1.21 s");
  CHECK_FALSE(measured(damaged({0.5, 1, 0.5}), {1.2, 1.2, 1.0}).far_from_shares());  // one sample, less than a tenth
}

TEST_CASE("a plan by the measured speeds has the shares that were told") {
  std::mt19937 generator(5);
  std::uniform_real_distribution<double> time(0.2, 0.5);
  for (int run = 0; run < 200; ++run) {
    Config config = damaged({time(generator), time(generator), time(generator)});
    if (run % 3 == 1) config.parallel.nonuniform.batch = BatchPolicy::kShrink;
    if (run % 3 == 2) config.numerics.reduction = Reduction::kInvariant;
    config.numerics.workers = 24;
    const MeasuredSpeeds told = measured(config, {time(generator), time(generator), time(generator)});
    REQUIRE_FALSE(told.then.samples.empty());
    config.parallel.nonuniform.speeds = told.speeds;
    CHECK(plan_replicas(config, 12).samples == told.then.samples);
  }
}

TEST_CASE("a replica that is left out has speed 1, and the slowest one share") {
  Config config = damaged({1, 1, 1});
  config.parallel.nonuniform.failed = {"dp1.tp0", "dp1.tp1", "dp2.tp1"};
  config.parallel.nonuniform.min_tensor = 3;
  CHECK(measured(config, {0.1, 0.4}).speeds == Speeds{1, 1, 0.25});

  const MeasuredSpeeds slow = measured(damaged({1, 1, 1}), {0.01, 0.01, 100});
  CHECK(slow.speeds == Speeds{1, 1, 0.0001});
  CHECK(slow.then.samples == Samples{12, 11, 1});
}

TEST_CASE("speeds by which a batch shrinks below its workers cannot share it") {
  Config config = damaged({1, 1, 1});
  config.parallel.nonuniform.batch = BatchPolicy::kShrink;
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 24;
  const MeasuredSpeeds slow = measured(config, {0.01, 0.01, 100});
  CHECK(slow.then.samples.empty());
  CHECK_FALSE(slow.far_from_shares());
  CHECK(contains(slow.describe(), "speeds=[1, 1, 0.0001] cannot share the batch: "));
  CHECK(contains(slow.describe(), "leave one of 3 replicas without any (use a larger train.global_batch_size"));
  CHECK(contains(slow.describe(), "; the longest work of a step takes 100 s"));
}

TEST_CASE("with batch: shrink faster replicas are far from the shares if they could do more") {
  Config config = damaged({1, 0.25, 0.25});
  config.parallel.nonuniform.batch = BatchPolicy::kShrink;  // 8, 2, 2
  const MeasuredSpeeds speeds = measured(config, {0.8, 0.2, 0.1});
  CHECK(speeds.now.samples == Samples{8, 2, 2});
  CHECK(speeds.speeds == Speeds{0.5, 0.5, 1});
  CHECK(speeds.then.samples == Samples{4, 4, 8});
  CHECK(speeds.far_from_shares());
}
