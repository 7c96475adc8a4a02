// Steps and evaluations where few samples or tokens count, or none: what they are sums over, at layouts of every kind.
#include <bit>
#include <cmath>

#include "comm/thread_communicator.h"
#include "small_model.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int32_t kEod = 5;

// Samples of made-up tokens without kEod, but for those said to be nothing else. A sample that is read twice is
// noticed.
class FewSamples final : public TokenSource {
 public:
  FewSamples(int64_t sequence_length, int64_t samples, std::vector<int64_t> masked = {})
      : TokenSource(sequence_length), samples_(samples), masked_(std::move(masked)) {}

  int64_t samples() const override { return samples_; }
  std::string describe() const override { return "few samples"; }

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override {
    const bool is_masked = std::ranges::find(masked_, sample) != masked_.end();
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] =
          is_masked ? kEod : kEod + 1 + static_cast<int32_t>((7 * sample + 3 * std::ssize(tokens) + 11 * i * i) % 50);
    }
  }

  int64_t samples_;
  std::vector<int64_t> masked_;
};

struct Layout {
  Topology topology;
  int64_t batch = 4;
  int64_t micro_batch = 1;
};

std::string describe(const Layout& layout) {
  return format("{}, batch {}, micro-batch {}", layout.topology.describe(true), layout.batch, layout.micro_batch);
}

Config config_of(const Layout& layout, Reduction reduction) {
  Config config = small_model(2);
  config.numerics.reduction = reduction;
  config.numerics.leaves = 2;
  config.numerics.workers = layout.topology.uniform() ? layout.topology.data : layout.batch;
  config.parallel.tensor = layout.topology.tensor;
  config.parallel.data = layout.topology.data;
  config.parallel.sequence = layout.topology.tensor > 1;
  config.parallel.uneven = true;
  config.train.steps = 4;
  config.train.global_batch_size = layout.batch;
  config.train.micro_batch_size = layout.micro_batch;
  config.train.eval_batches = 8;
  config.data.eod_id = kEod;
  config.data.eod_mask_loss = true;
  config.schedule.kind = ScheduleKind::kConstant;
  return config;
}

using Body = std::function<void(TrainState&, const ProcessGroups&)>;
void on_ranks(const Config& config, const Topology& topology, const Body& body) {
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, topology);
    TrainState state(config, groups, Stream(DeviceType::kCpu), measure_memory(config, topology, world.rank()));
    initialise(state.parameters(), state.stream(), config.train.seed, config.model.initializer_range);
    state.adopt_values();
    body(state, groups);
  });
}

Evaluation evaluate(const TokenSource& source, const Layout& layout, Reduction reduction) {
  const Config config = config_of(layout, reduction);
  Evaluation seen;
  on_ranks(config, layout.topology, [&](TrainState& state, const ProcessGroups& groups) {
    const Evaluation result =
        run_evaluation(state, config, groups, data_stream(source, config, Split::kValidation)).value();
    if (groups.world->rank() == 0) seen = result;
  });
  return seen;
}

Topology unequal(std::vector<int> widths, std::vector<int64_t> samples) {
  const auto replicas = static_cast<int>(widths.size());
  const int widest = *std::max_element(widths.begin(), widths.end());
  return {widest, replicas, std::move(widths), std::move(samples)};
}

// The last batch of 19 samples lacks some, at each of them; so do whole micro-batches, and all of a replica.
std::vector<Layout> layouts() {
  return {{{1, 1}, 4, 1},
          {{1, 1}, 5, 5},
          {{1, 1}, 7, 7},
          {{1, 1}, 16, 4},
          {{2, 1}, 6, 2},
          {{2, 2}, 8, 2},
          {{1, 4}, 12, 3},
          {{1, 2}, 64, 8},
          {unequal({2, 1}, {3, 1}), 4, 1},
          {unequal({1, 2}, {2, 6}), 8, 2}};
}

}  // namespace

TEST_CASE("An evaluation reads each sample of the split once, whatever the batch and the layout") {
  const FewSamples source(8, 19, {4, 17});
  for (const Reduction reduction : {Reduction::kInvariant, Reduction::kFast}) {
    const Evaluation one = evaluate(source, {{1, 1}, 1, 1}, reduction);  // eight batches of one sample
    CHECK(one.samples == 8);
    CHECK(one.tokens == 7 * 8);
    const Evaluation whole = evaluate(source, {{1, 1}, 19, 1}, reduction);
    CHECK(whole.samples == 19);
    CHECK(whole.tokens == 17 * 8);
    CHECK(whole.loss.value() != one.loss.value());
    for (const Layout& layout : layouts()) {
      INFO(describe(layout));
      const Evaluation found = evaluate(source, layout, reduction);
      CHECK(found.samples == 19);
      CHECK(found.tokens == 17 * 8);
      if (reduction == Reduction::kInvariant) {
        CHECK(std::bit_cast<uint64_t>(found.loss.value()) == std::bit_cast<uint64_t>(whole.loss.value()));
      } else {
        CHECK(std::abs(found.loss.value() - whole.loss.value()) < 1e-6);
      }
    }
  }
}

TEST_CASE("An evaluation of at most eval_batches batches leaves out what follows them") {
  const FewSamples all(8, 100), first(8, 24);
  const Layout layout{{2, 1}, 3, 1};
  const Evaluation some = evaluate(all, layout, Reduction::kInvariant);
  CHECK(some.samples == 24);
  CHECK(some.loss.value() == evaluate(first, layout, Reduction::kInvariant).loss.value());
}

TEST_CASE("An evaluation without counted tokens has no loss") {
  const FewSamples source(8, 2, {0, 1});
  for (const Topology& topology : {Topology{1, 1}, Topology{1, 2}, unequal({2, 1}, {3, 1})}) {
    const Evaluation found = evaluate(source, {topology, 4, 1}, Reduction::kFast);
    CHECK(!found.loss.has_value());
    CHECK(found.tokens == 0);
    CHECK(found.samples == 2);
  }
}

namespace {

// All that an update could change.
std::vector<float> state_of(const TrainState& state) {
  const Tensor& values = state.parameters().flat_values();
  std::vector<float> all(values.data<float>(), values.data<float>() + values.numel());
  for (const AdamW::OwnState& own : state.optimizer().own_states()) {
    for (const Tensor& part : {own.master, own.exp_avg, own.exp_avg_sq}) {
      all.insert(all.end(), part.data<float>(), part.data<float>() + part.numel());
    }
  }
  return all;
}

}  // namespace

TEST_CASE("A step without counted tokens changes nothing on any rank and has no loss, the steps around it do") {
  const FewSamples source(8, 16, {4, 5, 6, 7});  // the second step of four samples
  for (const Topology& topology : {Topology{1, 1}, Topology{2, 2}, unequal({2, 1}, {3, 1})}) {
    for (const Reduction reduction : {Reduction::kInvariant, Reduction::kFast}) {
      const Layout layout{topology, 4, 1};
      INFO(describe(layout));
      const Config config = config_of(layout, reduction);
      on_ranks(config, topology, [&](TrainState& state, const ProcessGroups& groups) {
        const DataStream data{source, Sampler(SampleOrder::kSequential, source.samples(), 0)};
        for (const int64_t step : {0, 1, 2}) {
          const std::vector<float> before = state_of(state);
          double said = 0;
          StepHooks hooks;
          hooks.gradients_complete = [&](const StepResult& complete) { said = complete.loss; };
          const StepResult result =
              run_step(state, config, groups, load_micro_batches(config, groups, data, step), step, hooks);
          const bool empty = step == 1;
          CHECK(result.tokens == (empty ? 0 : 32));
          CHECK(std::isnan(result.loss) == empty);
          CHECK(std::isnan(said) == empty);  // also in what is recorded of the step
          CHECK(result.left_out() == empty);
          CHECK(result.nonfinite.empty());
          CHECK((state_of(state) == before) == empty);
        }
      });
    }
  }
}
