#include "config/plan_cost.h"

#include "config/replica_shares.h"
#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

Config damaged(const std::vector<std::string>& failed, int data = 2) {
  Config config = valid_config();
  config.parallel.tensor = 4;
  config.parallel.data = data;
  config.parallel.nonuniform.failed = failed;
  config.train.global_batch_size = 24;
  return config;
}

}  // namespace

TEST_CASE("the cost of a plan is relative to the whole grid") {
  Config config = damaged({"dp0.tp1"});
  config.parallel.nonuniform.speeds = {0.5, 1};
  const PlanCost cost = plan_cost(config, plan_replicas(config, 8));  // 8 and 16 samples instead of 12 and 12
  CHECK(cost.step_time == Approx(16.0 / 12));
  CHECK(cost.throughput == Approx(12.0 / 16));
  CHECK(*cost.step_time_without_damaged == Approx(2));

  config.parallel.nonuniform.batch = BatchPolicy::kShrink;  // 6 and 12
  const PlanCost shrunk = plan_cost(config, plan_replicas(config, 8));
  CHECK(shrunk.step_time == Approx(1));
  CHECK(shrunk.throughput == Approx(18.0 / 24));

  const Config all = damaged({"dp0.tp1", "dp1.tp1"});
  const PlanCost reduced = plan_cost(all, plan_replicas(all, 8));
  CHECK(reduced.step_time == Approx(modelled_time(all, 3) / modelled_time(all, 4)));
  CHECK_FALSE(reduced.step_time_without_damaged.has_value());

  const Config whole = damaged({});
  const PlanCost none = plan_cost(whole, plan_replicas(whole, 8));
  CHECK(none.step_time == 1);
  CHECK(none.throughput == 1);
  CHECK(*none.step_time_without_damaged == 1);
}

TEST_CASE("a replica that is left out costs its share") {
  Config config = damaged({"dp1.tp0"}, 3);
  config.parallel.nonuniform.min_tensor = 4;
  const PlanCost cost = plan_cost(config, plan_replicas(config, 12));
  CHECK(cost.step_time == Approx(12.0 / 8));
  CHECK(*cost.step_time_without_damaged == Approx(12.0 / 8));
}
