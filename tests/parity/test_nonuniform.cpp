// Replicas of unequal tensor-parallel widths train as one rank does: every gradient, the trajectory, and in invariant
// numerics every bit.
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "invariant_models.h"
#include "support/rank_checks.h"
#include "support/wrapped_communicator.h"
#include "trajectory.h"

using namespace invar;
using namespace invar::test;

namespace {

std::string describe(const Layout& layout) {
  return format("{}, micro-batch {}, first replica {} samples", layout.topology().describe(layout.sequence),
                layout.micro_batch, layout.samples.front());
}

// Unequal widths, at the front and at the back, of two and three replicas; equal and unequal shares of 12 samples;
// more ranks than KV heads in some replicas. And equal ones with copies of KV heads whose owners would differ.
std::vector<Layout> unequal_layouts() {
  return {nonuniform({2, 1}, {6, 6}, false, 2),
          nonuniform({2, 1}, {8, 4}, true, 4),
          nonuniform({4, 3}, {6, 6}, true, 3),
          nonuniform({4, 3}, {7, 5}, false, 1, RecomputeKind::kFull),
          nonuniform({4, 2}, {8, 4}, true, 2, RecomputeKind::kSelective),
          nonuniform({4, 2}, {6, 6}, false, 3),
          nonuniform({3, 4}, {6, 6}, true, 1),
          nonuniform({3, 4}, {4, 8}, false, 4),
          nonuniform({4, 3, 2}, {4, 4, 4}, false, 4),
          nonuniform({4, 3, 2}, {6, 4, 2}, true, 2),
          nonuniform({1, 6}, {2, 10}, true, 2),
          nonuniform({4, 4, 4}, {4, 4, 4}, true, 2)};
}

std::vector<Layout> wide_layouts() {
  return {nonuniform({8, 7}, {6, 6}, true, 3), nonuniform({8, 7}, {8, 4}, false, 4)};
}

// The largest difference relative to the tensor's largest entry.
double worst_gradient_error(const Trajectory& a, const Trajectory& b) {
  double worst = 0;
  for (const auto& [name, values] : a.gradients) {
    const auto& other = b.gradients.at(name);
    double largest = 0;
    double difference = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(double{values[i]}));
      difference = std::max(difference, std::abs(double{values[i]} - other[i]));
    }
    if (largest > 0) worst = std::max(worst, difference / largest);
  }
  return worst;
}

// How far a run is from that of one rank, each entry up to a step.
struct Distance {
  double gradients = 0;  // of the first step
  std::vector<double> losses, norms;
  double validation = 0;
};
Distance distance(const Trajectory& one, const Trajectory& other) {
  Distance far;
  far.gradients = worst_gradient_error(one, other);
  far.validation = std::abs(other.validation - one.validation);
  double loss = 0, norm = 0;
  for (size_t step = 0; step < one.losses.size(); ++step) {
    loss = std::max(loss, std::abs(other.losses[step] - one.losses[step]));
    norm = std::max(norm, std::abs(other.norms[step] - one.norms[step]));
    far.losses.push_back(loss);
    far.norms.push_back(norm);
  }
  return far;
}

// What rounding alone does, which some models amplify: the largest distance of uniform layouts.
Distance noise(const Config& config, const Trajectory& one) {
  Distance most = distance(one, one);
  for (const Layout& layout :
       std::vector<Layout>{{2, true, 2, 3}, {3, false, 1, 4}, {4, true, 1, 2}, {1, false, 3, 2}}) {
    const Distance far = distance(one, train(config, layout));
    most.gradients = std::max(most.gradients, far.gradients);
    most.validation = std::max(most.validation, far.validation);
    for (size_t step = 0; step < far.losses.size(); ++step) {
      most.losses[step] = std::max(most.losses[step], far.losses[step]);
      most.norms[step] = std::max(most.norms[step], far.norms[step]);
    }
  }
  return most;
}

void compare(Config config, const std::vector<Layout>& layouts, int64_t steps = 10) {
  config.train.steps = steps;
  constexpr double kTimes = 10;
  const Trajectory one = train(config, {});
  const Distance band = noise(config, one);
  CHECK(band.gradients < 1e-4);
  CHECK(band.losses.front() < 1e-5);
  for (const Layout& layout : layouts) {
    INFO(describe(layout));
    const Trajectory other = train(config, layout);
    CHECK(other.initial == one.initial);
    const Distance far = distance(one, other);
    CHECK(far.gradients < kTimes * band.gradients);
    for (size_t step = 0; step < far.losses.size(); ++step) {
      CHECK(far.losses[step] < kTimes * band.losses[step] + 1e-6);
      CHECK(far.norms[step] < kTimes * band.norms[step] + 1e-5);
    }
    CHECK(far.validation < kTimes * band.validation);
    CHECK(other.differing == 0);
  }
}

void compare_bits(const Config& config, const std::vector<Layout>& layouts) {
  const std::vector<uint64_t> one = train_hashed(config, {}, {}, Dump::kFirstStep).bits();
  for (const Layout& layout : layouts) {
    INFO(describe(layout));
    CHECK(train_hashed(config, layout, {}, Dump::kFirstStep).bits() == one);
  }
}

Config as_fast(Config config) {
  config.numerics.reduction = Reduction::kFast;
  return config;
}

}  // namespace

TEST_CASE("fp32, Qwen3: replicas of unequal widths have the gradients and the trajectory of one rank") {
  compare(awkward_model(Precision::kF32), unequal_layouts());
  compare(as_fast(tied_qwen3(Precision::kF32)), wide_layouts());
}

TEST_CASE("fp32, Gemma 4: replicas of unequal widths have the gradients and the trajectory of one rank") {
  compare(awkward_gemma4(Precision::kF32), unequal_layouts());
  compare(as_fast(gemma4_e_series(Precision::kF32)), wide_layouts());
}

TEST_CASE("fifty steps: the trajectory of one rank, and then the same bits in all replicas") {
  compare(awkward_model(Precision::kF32), {nonuniform({4, 3}, {7, 5}, true, 1)}, 50);
  Config config = gemma4_e_series(Precision::kBF16);
  config.train.steps = 50;
  const Trajectory one = train(config, {});
  const Trajectory other = train(config, nonuniform({2, 4, 3}, {4, 4, 4}, true, 2));
  CHECK(other.losses == one.losses);
  CHECK(other.norms == one.norms);
  CHECK((other.trained == one.trained));
  CHECK(other.differing == 0);
}

TEST_CASE("invariant numerics: replicas of unequal widths have the bits of one rank") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    std::vector<Layout> layouts = unequal_layouts();
    layouts.push_back(nonuniform({8, 7}, {6, 6}, true, 3));
    compare_bits(tied_qwen3(precision), layouts);
    compare_bits(gemma4_e_series(precision), {nonuniform({8, 7}, {8, 4}, true, 2), nonuniform({2, 1}, {6, 6}, false, 3),
                                              nonuniform({4, 2}, {6, 6}, true, 3), nonuniform({3, 4}, {4, 8}, false, 2),
                                              nonuniform({4, 3, 2}, {6, 4, 2}, true, 1)});
    if (precision == Precision::kBF16) {  // of eight leaves the wider replica sends some rounded, the other one none
      Config rounded = tied_qwen3(precision);
      rounded.numerics.tensor_reduce_dtype = Precision::kBF16;
      compare_bits(rounded, {layouts.back(), nonuniform({4, 3, 2}, {6, 4, 2}, true, 1)});
    }
    compare_bits(gemma4_dense(precision), {nonuniform({4, 3}, {6, 6}, true, 3), nonuniform({6, 1}, {8, 4}, false, 4)});
  }
}

TEST_CASE("invariant numerics: more ranks than KV heads, in one replica or in both, have the bits of one rank") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (Config (*const make)(Precision) : {grouped_qwen3, grouped_gemma4}) {  // 2 KV heads; 2, in full layers 1
      compare_bits(make(precision), {nonuniform({4, 1}, {8, 4}, false, 2), nonuniform({3, 2}, {6, 6}, true, 3),
                                     nonuniform({3, 8}, {4, 8}, true, 4)});
    }
    // Runs of two, two and one query heads.
    compare_bits(uneven_qwen3(precision), {nonuniform({6, 4}, {6, 6}, true, 3), nonuniform({1, 5}, {4, 8}, false, 4)});
  }
}

TEST_CASE("control: one exchange of gradients tampered with changes the bits") {
  Config config = tied_qwen3(Precision::kF32);
  config.train.steps = 1;
  config.numerics.workers = 4;
  const Layout layout = nonuniform({2, 1, 1}, {6, 3, 3}, false, 3);
  const std::vector<uint64_t> one = train_hashed(config, {}).bits();
  CHECK(train_hashed(config, layout).bits() == one);
  const auto prepare = [](ProcessGroups& groups) {
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(groups.exchange));
    wrapped->tamper_with_all_to_all([rank = groups.world->rank(), first = true](const Tensor& received) mutable {
      if (std::exchange(first, false) && rank == 1) received.span<float>()[0] *= 1.0f + 0x1p-20f;
    });
    groups.exchange = std::move(wrapped);
  };
  CHECK(train_hashed(config, layout, prepare).bits() != one);
}

TEST_CASE("control: a fast exchange of gradients tampered with lies outside the band") {
  Config config = awkward_model(Precision::kF32);
  const Trajectory one = train(config, {});
  const Distance band = noise(config, one);
  const Layout layout = nonuniform({2, 1}, {6, 6}, false, 2);
  CHECK(distance(one, train(config, layout)).gradients < 10 * band.gradients);
  const auto prepare = [](ProcessGroups& groups) {
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(groups.exchange));
    wrapped->tamper_with_all_to_all([rank = groups.world->rank()](const Tensor& received) {
      if (rank == 1 && received.dtype() == DType::kF32) received.span<float>()[0] = 0;
    });
    groups.exchange = std::move(wrapped);
  };
  const Trajectory tampered = train(config, layout, prepare);
  CHECK(distance(one, tampered).gradients > 10 * band.gradients);
  CHECK(tampered.differing > 0);  // new values come by the same way
}

namespace {

// Lets a test step in before each exchange.
class BeforeExchange : public WrappedCommunicator {
 public:
  using WrappedCommunicator::WrappedCommunicator;
  std::function<void(std::span<const Message> sends)> before;

  void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    if (before) before(sends);
    WrappedCommunicator::exchange(stream, sends, receives);
  }
};

enum class Rows : uint8_t { kSent, kOwned };  // of a gradient, by the rank that has made it

// The values, masters and moments that a rank has.
std::vector<float> state_of(const TrainState& state) {
  const Tensor& values = state.parameters().flat_values();
  std::vector<float> all = read_f32(state.stream(), values, {0, values.numel()});
  for (const AdamW::OwnState& own : state.optimizer().own_states()) {
    for (const Tensor& part : {own.master, own.exp_avg, own.exp_avg_sq}) {
      all.insert(all.end(), part.data<float>(), part.data<float>() + part.numel());
    }
  }
  return all;
}

// Makes one element of the gradient of one rank infinite in its second step of three, once the backward passes are
// done and before any sum over replicas.
void check_infinity(const Config& config, const Layout& layout, int bad_rank, Rows rows) {
  std::vector<std::string> said(static_cast<size_t>(layout.topology().world()));
  run_thread_ranks(layout.topology().world(), [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, layout.topology());
    auto wrapped = std::make_unique<BeforeExchange>(std::move(groups.exchange));
    BeforeExchange& exchange = *wrapped;
    groups.exchange = std::move(wrapped);
    MockRun run(config, groups);
    bool bad_is_to_come = world.rank() == bad_rank;
    const auto make_bad = [&](std::span<const Message> sends) {
      if (!bad_is_to_come || (rows == Rows::kSent && sends.empty())) return;
      const RowOwnership::Piece own = run.state.ownership().pieces().front();  // of the bucket that is summed last
      const int64_t at = own.elements.begin;
      const Tensor bad = rows == Rows::kSent ? sends.front().buffer : run.state.parameters().gradients(0, {at, at + 1});
      bad.span<float>()[0] = std::numeric_limits<float>::infinity();
      bad_is_to_come = false;
    };
    DeviceTimer timer;
    StepHooks hooks;
    hooks.work = &timer;  // no sum before the last backward pass is done
    for (const int64_t step : {0, 1, 2}) {
      exchange.before = step == 1 ? make_bad : std::function<void(std::span<const Message>)>();
      const std::vector<float> before = state_of(run.state);
      const StepResult result = run.train(step, hooks);
      CHECK(std::isfinite(result.loss));
      CHECK(std::isfinite(result.grad_norm) == (step != 1));
      CHECK(result.nonfinite.empty() == (step != 1));
      CHECK((state_of(run.state) == before) == (step == 1));
      if (step == 1) said[static_cast<size_t>(world.rank())] = result.nonfinite;
    }
    CHECK_FALSE(bad_is_to_come);
  });
  CHECK(said.front().find("in backward first in the gradient of ") != std::string::npos);
  CHECK(std::ranges::count(said, said.front()) == std::ssize(said));
}

}  // namespace

TEST_CASE("infinity in the gradient of a rank that the narrower replica lacks: all ranks leave the step out alike") {
  const Layout layout = nonuniform({2, 4}, {6, 6}, true, 2);
  for (Config config :
       {tied_qwen3(Precision::kF32), as_fast(tied_qwen3(Precision::kF32)), as_fast(tied_qwen3(Precision::kBF16))}) {
    use_layout(config, layout);
    for (const int extra : {4, 5}) {
      for (const Rows rows : {Rows::kSent, Rows::kOwned}) {
        INFO("rank " << extra << (rows == Rows::kSent ? ", of rows that it sends" : ", of rows that it owns"));
        check_infinity(config, layout, extra, rows);
      }
    }
  }
}

namespace {

// Some calls of each group of a rank come late, by up to a millisecond.
void delay(ProcessGroups& groups) {
  for (std::unique_ptr<Communicator>* group : {&groups.exchange, &groups.tensor}) {
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(*group));
    wrapped->tamper_with_all_to_all(
        [random = std::mt19937(static_cast<unsigned>(groups.world->rank()))](const Tensor&) mutable {
          if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
        });
    *group = std::move(wrapped);
  }
}

void check_late_ranks(int64_t steps) {
  Config config = tied_qwen3(Precision::kF32);
  config.train.steps = steps;
  const Layout layout = nonuniform({3, 2}, {6, 6}, true, 2);
  CHECK(train_hashed(config, layout, delay).bits() == train_hashed(config, {1, false, 1, 12}).bits());
}

}  // namespace

TEST_CASE("ranks that are late at random neither hang nor change a bit") {
  check_late_ranks(80);
}

TEST_CASE("nor in a thousand steps", "[.long]") {
  check_late_ranks(1000);
}
