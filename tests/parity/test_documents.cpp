// Documents packed into one sample, with data.reset_at_eod, train as documents that are samples of their own do.
#include <cmath>
#include <map>

#include "awkward_models.h"
#include "comm/thread_communicator.h"
#include "core/philox.h"
#include "parallel/logical_tensor.h"
#include "parallel/poisoned_weights.h"
#include "support/catch.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kDocument = 40;
constexpr int64_t kDocuments = 6;

// One stream of random tokens, in which every document ends after kDocument tokens, cut into samples.
class DocumentStream final : public TokenSource {
 public:
  DocumentStream(int64_t sequence_length, int32_t eod) : TokenSource(sequence_length), eod_(eod) {}
  int64_t samples() const override { return kDocuments * kDocument / sequence_length(); }
  std::string describe() const override { return "documents"; }

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override {
    const Philox random(1, RandomPurpose::kMockTokens, 0);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto at = static_cast<uint64_t>(sample * sequence_length()) + i;
      tokens[i] =
          at % kDocument == kDocument - 1 ? eod_ : static_cast<int32_t>(random.below(at, static_cast<uint64_t>(eod_)));
    }
  }

  int32_t eod_;
};

struct Outcome {
  double loss = 0;
  double validation = 0;
  std::map<std::string, std::vector<float>> gradients;
};

// One step over all documents, in samples of some of them.
Outcome run_documents(Config config, int64_t documents_per_sample, int tensor = 1) {
  config.train.sequence_length = documents_per_sample * kDocument;
  config.train.global_batch_size = kDocuments / documents_per_sample;
  config.train.micro_batch_size = config.train.global_batch_size;
  config.train.eval_batches = 1;
  config.parallel.tensor = tensor;
  config.parallel.sequence = tensor > 1;
  config.optimizer.lr = 0;
  config.data.eod_id = config.model.vocab_size - 1;
  Outcome outcome;
  run_thread_ranks(tensor, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {tensor, 1});
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()), poisoned_weights);
    initialise(state.parameters(), stream, 1, 0.1);
    state.adopt_values();
    const DocumentStream source(config.train.sequence_length, static_cast<int32_t>(config.model.vocab_size) - 1);
    const DataStream data{source, Sampler(SampleOrder::kSequential, source.samples(), 0)};
    Outcome mine;
    StepHooks hooks;
    hooks.gradients_complete = [&](const StepResult& result) {
      mine.loss = result.loss;
      for (const Weight& weight : state.parameters().weights()) {
        for (const Parameter& parameter : weight.parameters) {
          if (!parameter.trained) continue;
          mine.gradients[parameter.name] =
              collect_logical(*groups.tensor, stream, state.parameters().flat_gradients(), weight, parameter);
        }
      }
    };
    run_step(state, config, groups, load_micro_batches(config, groups, data, 0), 0, hooks);
    mine.validation = run_evaluation(state, config, groups, data).value().loss.value();
    if (world.rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

// Largest difference of a gradient's elements over its largest element.
double worst_gradient_error(const Outcome& actual, const Outcome& expected) {
  REQUIRE(actual.gradients.size() == expected.gradients.size());
  double worst = 0;
  for (const auto& [name, values] : expected.gradients) {
    double size = 0, error = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      size = std::max(size, std::abs(double{values[i]}));
      error = std::max(error, std::abs(double{actual.gradients.at(name)[i]} - values[i]));
    }
    INFO(name);
    REQUIRE(size > 0);
    REQUIRE(std::isfinite(error));
    worst = std::max(worst, error / size);
  }
  return worst;
}

void check_documents(Config config) {
  const Outcome apart = run_documents(config, 1);
  config.data.reset_at_eod = true;
  // One document per sample; the ends are there.
  CHECK(run_documents(config, 1).loss == apart.loss);
  for (const int64_t documents_per_sample : {2, 3, 6}) {
    for (const int tensor : {1, 2}) {
      INFO(documents_per_sample << " documents per sample, tensor " << tensor);
      const Outcome packed = run_documents(config, documents_per_sample, tensor);
      CHECK(packed.loss == Approx(apart.loss).epsilon(1e-6));
      CHECK(packed.validation == Approx(apart.validation).epsilon(1e-6));
      CHECK(worst_gradient_error(packed, apart) < 1e-4);
    }
  }
  // In one tile of attention a document has the bits that it has alone. Positions that went on would differ by
  // rounding, and by no more than that: RoPE is relative.
  const Outcome pairs = run_documents(config, 2);
  CHECK(pairs.loss == apart.loss);
  CHECK(pairs.gradients == apart.gradients);
  config.data.reset_at_eod = false;
  const Outcome mixed = run_documents(config, 3);
  CHECK(std::abs(mixed.loss - apart.loss) > 1e-3);
  CHECK(worst_gradient_error(mixed, apart) > 0.05);
}

}  // namespace

TEST_CASE("Qwen3: documents packed into samples have the loss and the gradients of documents apart") {
  Config config = awkward_model(Precision::kF32);
  config.train.recompute = GENERATE(RecomputeKind::kNone, RecomputeKind::kSelective, RecomputeKind::kFull);
  check_documents(config);
}

TEST_CASE("Gemma 4: documents packed into samples have the loss and the gradients of documents apart") {
  Config config = awkward_gemma4(Precision::kF32);
  config.train.recompute = GENERATE(RecomputeKind::kNone, RecomputeKind::kSelective, RecomputeKind::kFull);
  check_documents(config);
}
