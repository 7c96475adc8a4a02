#include "train/train_state.h"

#include <cmath>
#include <map>
#include <mutex>

#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "parallel/poisoned_weights.h"
#include "small_model.h"
#include "support/rank_checks.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

std::vector<Batch> first_batches(const Config& config, const ProcessGroups& groups) {
  const auto source = make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()));
  return load_micro_batches(config, groups, data_stream(*source, config, Split::kTrain), 0);
}

// Of all ranks: elements of a parameter that are not those of the rank that gave it first.
class Copies {
 public:
  // Returns those that differ on this rank.
  int64_t compare(const ParameterTable& table) {
    const std::lock_guard lock(mutex_);
    const auto values = table.flat_values().span<float>();
    int64_t different = 0;
    table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
      for (int64_t i = 0; i < elements.size(); ++i) {
        const int64_t logical = parameter.logical_index(run.global.begin + i / weight.cols, i % weight.cols);
        const float value = values[static_cast<size_t>(elements.begin + i)];
        const auto [at, first] = all_.try_emplace({parameter.name, logical}, value);
        compared_ += first ? 0 : 1;
        different += at->second != value || !std::isfinite(value) ? 1 : 0;
      }
    });
    return different;
  }
  int64_t compared() const { return compared_; }
  const std::map<std::pair<std::string, int64_t>, float>& all() const { return all_; }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int64_t>, float> all_;
  int64_t compared_ = 0;
};

}  // namespace

TEST_CASE("a state's sums are those of its config's numerics, on the stream that it was given") {
  Config config = small_model(1);
  config.parallel.tensor = 1;
  config.numerics.reduction = GENERATE(Reduction::kFast, Reduction::kInvariant);
  const bool invariant = config.numerics.reduction == Reduction::kInvariant;
  config.numerics.workers = 4;
  config.train.global_batch_size = 4;
  const auto world = make_self_communicator();
  const ProcessGroups groups = make_process_groups(*world, {});
  const Stream given(DeviceType::kCpu, 3);
  const TrainState state(config, groups, given, measure_memory(config, groups.topology, 0));
  CHECK((state.parameters().gradient_buffers() > 1) == invariant);
  CHECK(state.stream().threads() == 3);
}

TEST_CASE("a step on weights that are poisoned outside their handles gives the same bits") {
  Config config = small_model(2);
  config.model.tie_word_embeddings = GENERATE(false, true);
  config.train.recompute = GENERATE(RecomputeKind::kNone, RecomputeKind::kFull);
  config.numerics.reduction = GENERATE(Reduction::kFast, Reduction::kInvariant);
  config.numerics.workers = 2;
  config.numerics.leaves = 2;
  config.train.global_batch_size = 2;
  std::vector<Copies> after(2);
  for (const bool poisoned : {false, true}) {
    run_thread_ranks(2, [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, {2, 1});
      const Stream stream(DeviceType::kCpu);
      TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()),
                       poisoned ? poisoned_weights : TrainState::WeightStoreMaker());
      initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
      state.adopt_values();
      const StepResult result = run_step(state, config, groups, first_batches(config, groups), 0);
      CHECK(std::isfinite(result.loss));
      state.await_values();
      const int64_t different = after[poisoned ? 1 : 0].compare(state.parameters());
      CHECK(different == 0);
    });
  }
  CHECK(after[0].all() == after[1].all());
}

TEST_CASE("a rank's memory has room for the proofs of invariant numerics in bf16 on GPUs, and for none elsewhere") {
  Config config = small_model(1);
  config.parallel.tensor = 1;
  config.model.vocab_size = 4096;
  config.numerics.precision = Precision::kBF16;
  config.numerics.workers = 1;
  config.numerics.leaves = 1;
  const auto proofs = [&](Reduction reduction, DeviceType target) {
    config.numerics.reduction = reduction;
    return measure_memory(config, {}, 0, target).proofs;
  };
  CHECK(proofs(Reduction::kFast, DeviceType::kCuda) == 0);
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCpu) == 0);
  // The largest is that of the head's weights: their gradient in f32, and the gradients of 8 tokens' logits.
  const int64_t head = 4096 * 32 * 4 + 8 * 4096 * 2;
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) >= head);
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) < head + 8192);
  config.numerics.precision = Precision::kF32;
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) == 0);
}

TEST_CASE("after a step all copies are equal, though the gradients of those that are not the owner's are others") {
  Config config = small_model(2);  // on two of three ranks, or two and two of four, copies of KV heads
  const std::vector<int> widths = GENERATE(values<std::vector<int>>({{3, 3, 3}, {4, 4}, {3, 4}}));
  const bool equal = widths.front() == widths.back();
  const Topology topology{widths.back(), static_cast<int>(std::ssize(widths)), equal ? std::vector<int>() : widths, {}};
  INFO(topology.describe(false));
  config.parallel.tensor = topology.tensor;
  config.parallel.data = topology.data;
  config.parallel.uneven = true;
  config.train.global_batch_size = topology.data;
  Copies before, after;
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, topology);
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, topology, world.rank()));
    initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
    state.adopt_values();
    (void)before.compare(state.parameters());
    StepHooks hooks;
    hooks.gradients_complete = [&](const StepResult&) {
      const ParameterTable& table = state.parameters();
      std::vector<bool> own(static_cast<size_t>(table.flat_size()));
      for (const OwnedRows& rows : state.ownership().owned_rows()) {
        for (int64_t i = rows.elements.begin; i < rows.elements.end; ++i) own[static_cast<size_t>(i)] = true;
      }
      const auto gradients = table.flat_gradients().span<float>();
      for (size_t i = 0; i < own.size(); ++i) {
        if (!own[i]) gradients[i] = static_cast<float>(world.rank() + 1) * (i % 2 == 0 ? 1.0f : -1.0f);
      }
    };
    const StepResult result = run_step(state, config, groups, first_batches(config, groups), 0, hooks);
    CHECK(result.grad_norm > 0);
    state.await_values();
    const int64_t different = after.compare(state.parameters());
    CHECK(different == 0);
  });
  CHECK(after.compared() > std::ssize(after.all()));
  int64_t changed = 0;
  for (const auto& [element, value] : after.all()) changed += before.all().at(element) != value ? 1 : 0;
  CHECK(changed > std::ssize(after.all()) / 2);
}
