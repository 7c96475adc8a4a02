#include "train/anomaly.h"
#include "train/dry_run.h"

#include <cmath>
#include <limits>

#include "comm/thread_communicator.h"
#include "small_model.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Mean 2, standard deviation 0.1.
double usual_loss(size_t i) {
  return i % 2 == 0 ? 1.9 : 2.1;
}

// The result of a step on TP=2 + SP, DP=2 after poison() changed the weights of one rank.
StepResult step_with(const std::function<void(const ParameterTable&)>& poison) {
  Config config = small_model(3);
  config.parallel.sequence = true;
  config.parallel.data = 2;
  config.train.steps = 1;
  config.train.global_batch_size = 2;
  StepResult seen;
  run_thread_ranks(4, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {2, 2});
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()));
    initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
    state.adopt_values();
    if (world.rank() == 3) poison(state.parameters());
    const auto source = make_token_source(config.data, token_request(config, Split::kTrain, 4));
    const DataStream data = data_stream(*source, config, Split::kTrain);
    const Tensor& values = state.parameters().flat_values();
    const std::vector<float> before(values.data<float>(), values.data<float>() + values.numel());
    const StepResult result = run_step(state, config, groups, load_micro_batches(config, groups, data, 0), 0);
    const bool untouched = std::equal(before.begin(), before.end(), values.data<float>(),
                                      [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); });
    CHECK(untouched == !result.nonfinite.empty());
    if (world.rank() == 0) seen = result;
  });
  return seen;
}

const Weight& find_weight(const ParameterTable& table, const std::string& parameter) {
  for (const Weight& weight : table.weights()) {
    for (const Parameter& candidate : weight.parameters) {
      if (candidate.name == parameter) return weight;
    }
  }
  throw Error(ErrorKind::kFault, "no " + parameter);
}

}  // namespace

TEST_CASE("A loss that stands out has its z-score; those before enough are known have none") {
  SpikeDetector spikes(6);
  for (size_t i = 0; i < SpikeDetector::kLeast; ++i) CHECK(!spikes.add(i == 5 ? 2.1 : usual_loss(i)));
  CHECK(!spikes.add(2.5));
  SpikeDetector fresh(6);
  for (size_t i = 0; i < SpikeDetector::kLeast; ++i) fresh.add(usual_loss(i));
  const std::optional<double> spike = fresh.add(2.8);
  REQUIRE(spike.has_value());
  CHECK(*spike == Approx(8));
  CHECK(!fresh.add(2.8));  // the spike is now one of the losses that it is judged by
}

TEST_CASE("Losses beyond the window are forgotten, and what is not finite is left out") {
  SpikeDetector spikes(6);
  for (size_t i = 0; i < 50; ++i) spikes.add(100.0 + usual_loss(i));
  for (size_t i = 0; i < SpikeDetector::kWindow; ++i) spikes.add(usual_loss(i));
  CHECK(!spikes.add(std::nan("")));
  CHECK(!spikes.add(std::numeric_limits<double>::infinity()));
  const std::optional<double> spike = spikes.add(2.8);
  REQUIRE(spike.has_value());
  CHECK(*spike == Approx(8));
}

TEST_CASE("Equal losses and a threshold of 0 report nothing") {
  SpikeDetector constant(6);
  for (int i = 0; i < 30; ++i) CHECK(!constant.add(2.0));
  SpikeDetector off(0);
  for (size_t i = 0; i < 30; ++i) off.add(usual_loss(i));
  CHECK(!off.add(1e9));
}

namespace {

StepResult result_of(int64_t tokens, const std::string& nonfinite = "") {
  StepResult result;
  result.tokens = tokens;
  result.nonfinite = nonfinite;
  return result;
}

}  // namespace

TEST_CASE("Steps without counted tokens are left out, and too many in a row end the run whatever on_nonfinite says") {
  for (const NonfinitePolicy policy : {NonfinitePolicy::kStop, NonfinitePolicy::kSkip}) {
    Config config;
    config.data.eod_id = 7;
    config.train.on_nonfinite = policy;
    LeftOutSteps steps(config);
    for (const int row : {1, 2}) {
      for (int i = 0; i < LeftOutSteps::kMostInARow; ++i) CHECK(!steps.add(result_of(0)));
      if (row == 1) CHECK(!steps.add(result_of(1)));  // begins anew
    }
    const std::optional<Error> error = steps.add(result_of(0));
    REQUIRE(error);
    CHECK(error->kind() == ErrorKind::kData);
    CHECK(contains(error->what(), "none of its tokens counts"));
    CHECK(contains(error->what(), "data.eod_id = 7"));
    CHECK(contains(error->what(), "the 10 steps before it neither"));
    CHECK(contains(error->hint(), "data.eod_mask_loss: false"));
  }
}

TEST_CASE("A step without counted tokens neither ends nor continues a row of steps that are not finite") {
  Config config;
  config.train.on_nonfinite = NonfinitePolicy::kSkip;
  LeftOutSteps steps(config);
  for (int i = 0; i < LeftOutSteps::kMostInARow; ++i) CHECK(!steps.add(result_of(5, "somewhere")));
  CHECK(!steps.add(result_of(0)));
  CHECK(steps.nonfinite_in_a_row() == LeftOutSteps::kMostInARow);
  const std::optional<Error> error = steps.add(result_of(5, "somewhere"));
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::kFault);
  CHECK(contains(error->what(), "not finite, somewhere; this step changed no weights; the 10 steps before it neither"));
  CHECK(!steps.add(result_of(5)));
  CHECK(steps.nonfinite_in_a_row() == 0);
}

TEST_CASE("A sound step says nothing") {
  const StepResult result = step_with([](const ParameterTable&) {});
  CHECK(result.nonfinite.empty());
  CHECK(std::isfinite(result.loss));
}

TEST_CASE("NaN of one rank is found by all, with the layer, and nothing is updated") {
  const StepResult result = step_with([](const ParameterTable& table) {
    find_weight(table, "model.layers.1.mlp.down_proj.weight").value.data<float>()[3] = kNan;
  });
  CHECK(std::isnan(result.loss));
  CHECK(contains(result.nonfinite, "output of decoder layer 1"));
}

TEST_CASE("NaN behind the layers is told from NaN in one") {
  const StepResult result = step_with(
      [](const ParameterTable& table) { find_weight(table, "model.norm.weight").value.data<float>()[0] = kNan; });
  CHECK(contains(result.nonfinite, "final norm or the head"));
}
