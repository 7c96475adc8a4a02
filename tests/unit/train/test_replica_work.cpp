#include "train/replica_work.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <thread>

#include "comm/thread_communicator.h"
#include "small_model.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

// Two replicas, of two ranks and of one, with six and two micro-batches.
Config unequal() {
  Config config = small_model(1);
  config.parallel.nonuniform.tensor_widths = {2, 1};
  config.parallel.nonuniform.speeds = {3, 1};
  config.train.steps = 2;
  config.train.global_batch_size = 8;
  return config;
}

void on_ranks(const std::function<void(const Config&, const ReplicaPlan&, const ProcessGroups&)>& body) {
  const Config config = unequal();
  const ReplicaPlan plan = plan_replicas(config, 3);
  run_thread_ranks(3, [&](Communicator& world) { body(config, plan, make_process_groups(world, topology_of(plan))); });
}

// A rank that is slow while its layers compute, on a hidden state in each of two micro-batches.
class Slow final : public TensorSink {
 public:
  explicit Slow(int ms) : ms_(ms) {}
  bool wants(std::string_view name) const override { return name.find("hidden") != std::string_view::npos; }
  void record(const std::string&, const Tensor&, int64_t) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms_ / 2));
  }

 private:
  const int ms_;
};

// Of a step in which the second replica is slow, by so much, the largest time that a rank of each replica has measured.
std::array<double, 2> measured_work(int slow_ms) {
  std::array<double, 2> longest{};
  std::mutex mutex;
  on_ranks([&](const Config& config, const ReplicaPlan&, const ProcessGroups& groups) {
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, groups.world->rank()));
    initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
    state.adopt_values();
    const auto source = make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()));
    const DataStream data = data_stream(*source, config, Split::kTrain);
    Slow slow(slow_ms);
    DeviceTimer timer;
    StepHooks hooks;
    hooks.work = &timer;
    if (groups.reader() == 1) hooks.sink = &slow;
    run_step(state, config, groups, load_micro_batches(config, groups, data, 0), 0, hooks);
    const std::lock_guard lock(mutex);
    double& ms = longest[static_cast<size_t>(groups.reader())];
    ms = std::max(ms, timer.milliseconds());
  });
  return longest;
}

}  // namespace

TEST_CASE("a replica takes as long as its slowest rank, by the median over steps after the first two") {
  on_ranks([](const Config& config, const ReplicaPlan& plan, const ProcessGroups& groups) {
    ReplicaWork work(config, plan);
    const auto rank = static_cast<size_t>(groups.world->rank());
    const auto step = [&](const std::vector<double>& seconds) {
      work.add(seconds[rank]);
      return work.gather(groups);
    };
    const std::vector<double> first = step({90, 80, 70});
    CHECK(first == std::vector<double>{90, 70});
    step({8, 9, 7});
    CHECK(!work.speeds().has_value());
    step({1, 3, 2});
    step({1, 3, 2});
    const std::vector<double> last = step({1, 3, 50});
    CHECK(last == std::vector<double>{3, 50});
    CHECK(work.speeds()->speeds == std::vector<double>{1, 0.5});  // six samples in three seconds, two in two
    CHECK(work.speeds()->now.seconds == 3);
    // What is long ago is forgotten.
    for (size_t i = 0; i < ReplicaWork::kLastSteps; ++i) work.add(std::vector<double>{1, 1, 1}[rank]);
    work.gather(groups);
    CHECK(work.speeds()->speeds == std::vector<double>{1, 0.333});
  });
}

TEST_CASE("shares that are far off are told, then at twice the steps") {
  on_ranks([](const Config& config, const ReplicaPlan& plan, const ProcessGroups& groups) {
    ReplicaWork work(config, plan);
    const auto told_within = [&](int steps) {
      std::vector<int> told;
      for (int step = 1; step <= steps; ++step) {
        work.add(groups.reader() == 0 ? 3 : 1);
        work.gather(groups);
        if (!work.news() || !work.news()) continue;  // asking changes nothing
        told.push_back(step);
        work.told();
      }
      return told;
    };
    const std::vector<int> told = told_within(40);
    CHECK(told == std::vector<int>{8, 16, 32});
    // By another plan steps are counted anew, and as patiently.
    work.start_anew(config, plan);
    CHECK(!work.speeds().has_value());
    const std::vector<int> told_anew = told_within(64);
    CHECK(told_anew == std::vector<int>{64});
    ReplicaWork right(config, plan);
    for (int step = 1; step <= 40; ++step) {
      right.add(1);
      right.gather(groups);
      CHECK(!right.news().has_value());
    }
  });
}

TEST_CASE("what a step measures is own work, without waiting for other replicas") {
  // On a busy machine the own work takes long too, but not as long as any wait for the other replica.
  bool apart = false;
  for (int slow_ms = 250; !apart && slow_ms <= 16'000; slow_ms *= 4) {
    const auto [fast, slow] = measured_work(slow_ms);
    INFO(fast << " and " << slow << " ms, of which " << slow_ms << " asleep");
    REQUIRE(slow >= slow_ms);
    apart = fast < 0.9 * slow_ms;  // sums wait for the other replica
  }
  CHECK(apart);
}
