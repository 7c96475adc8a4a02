// The comparisons of this suite must be able to fail. Each case leaves out one thing that a tensor-parallel trainer is
// known to forget, and expects the reference comparison to notice, in the right place.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "app/reference_case.h"
#include "checkpoint/hf_weights.h"
#include "comm/thread_communicator.h"
#include "ops/elementwise.h"
#include "parallel/logical_tensor.h"
#include "parallel/poisoned_weights.h"
#include "support/rank_checks.h"
#include "support/wrapped_communicator.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::app;

namespace {

ReferenceCase qwen3_case() {
  return ReferenceCase(INVAR_SOURCE_DIR "/tests/reference/qwen3");
}

Config layout(const ReferenceCase& reference, int tensor, bool sequence) {
  Config config = reference.config();
  config.parallel.tensor = tensor;
  config.parallel.sequence = sequence;
  return config;
}

// Gradients of parameters whose name contains one of `names` keep this rank's own term: their sum over the tensor
// group is dropped, and nothing else.
AgreementTable without_sum_of(const std::vector<std::string>& names, bool sequence) {
  const ReferenceCase reference = qwen3_case();
  const Config config = layout(reference, 2, sequence);
  AgreementTable result;
  std::mutex mutex;
  run_thread_ranks(2, [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, {2, 1});
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(groups.tensor));
    WrappedCommunicator& tensor = *wrapped;
    groups.tensor = std::move(wrapped);
    const Stream stream(DeviceType::kCpu);
    const auto prepared = [&](TrainState& state) {
      tensor.tamper_with_all_reduce([&, gradients = state.parameters().flat_gradients()](const Tensor& buffer) {
        const std::less<const void*> before;
        const void* first = gradients.raw();
        const void* last = gradients.rows(gradients.dim(0), gradients.dim(0)).raw();
        std::vector<std::pair<Range, std::vector<float>>> kept;
        if (!before(buffer.raw(), first) && before(buffer.raw(), last)) {
          state.parameters().for_each_run([&](const Weight&, const Parameter& p, const RowRun&, Range elements) {
            const bool named = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
              return p.name.find(name) != std::string::npos;
            });
            if (named) kept.push_back({elements, read_f32(Stream(DeviceType::kCpu), gradients, elements)});
          });
        }
        return [kept, gradients] {
          for (const auto& [elements, values] : kept) {
            std::copy(values.begin(), values.end(), gradients.data<float>() + elements.begin);
          }
        };
      });
    };
    const AgreementTable table = compare_with_reference(reference, config, groups, stream, {prepared, nullptr});
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) result = table;
  });
  return result;
}

std::vector<std::string> broken(const AgreementTable& table) {
  std::vector<std::string> kinds;
  for (const auto& [kind, agreement] : table) {
    if (!agreement.holds() && kind.starts_with("gradient ")) kinds.push_back(kind);
  }
  return kinds;
}

}  // namespace

TEST_CASE("nothing dropped: the comparison holds") {
  CHECK(all_hold(without_sum_of({}, false)));
  CHECK(all_hold(without_sum_of({}, true)));
}

TEST_CASE("dropping the sum of q/k-norm gradients over the tensor group is noticed, without sequence parallelism too") {
  for (const bool sequence : {false, true}) {
    const AgreementTable table = without_sum_of({"q_norm", "k_norm"}, sequence);
    CHECK(broken(table) == std::vector<std::string>{"gradient self_attn.k_norm", "gradient self_attn.q_norm"});
    CHECK_FALSE(table.at(kGradientNorms).holds());
  }
}

TEST_CASE("dropping the sum of norm gradients under sequence parallelism is noticed") {
  const AgreementTable table = without_sum_of({"layernorm", "model.norm"}, true);
  CHECK(broken(table) ==
        std::vector<std::string>{"gradient input_layernorm", "gradient norm", "gradient post_attention_layernorm"});
}

TEST_CASE("without sequence parallelism the norms' gradients are complete: there is no sum to drop") {
  CHECK(all_hold(without_sum_of({"layernorm", "model.norm"}, false)));
}

TEST_CASE("counting replicated weights once per rank leaves the band of the gradient norm") {
  const ReferenceCase reference = qwen3_case();
  const Config config = layout(reference, 2, true);
  std::vector<float> norms(static_cast<size_t>(reference.steps()));
  reference.expected().read_rows("traj_grad_norm", {0, reference.steps()}, {0, 1}, norms);
  run_thread_ranks(2, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {2, 1});
    const Stream stream(DeviceType::kCpu);
    // The wrong rule: every rank adds all that it holds.
    double counted_twice = 0;
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()), poisoned_weights);
    load_hf_weights(state.parameters(), state.stream(), HfWeights(config.model.hf_path));
    state.adopt_values();
    const auto tokens = reference.tokens();
    const DataStream data{*tokens, Sampler(SampleOrder::kSequential, tokens->samples(), 0)};
    StepHooks hooks;
    hooks.gradients_complete = [&](const StepResult&) {
      counted_twice = 0;
      ops::add_sum_of_squares(stream, state.parameters().flat_gradients(),
                              Tensor(&counted_twice, DType::kF64, DeviceType::kCpu, {1}));
    };
    const StepResult right = run_step(state, config, groups, load_micro_batches(config, groups, data, 0), 0, hooks);
    const double wrong = std::sqrt(all_reduce_value(world, counted_twice, ReduceOp::kSum));
    CHECK(std::abs(right.grad_norm - norms[0]) < reference.norm_band());
    CHECK(std::abs(wrong - norms[0]) > reference.norm_band());
  });
}

namespace {

// Two samples with 30 and 3 counted labels.
Batch unequal_batch() {
  Batch batch;
  for (int32_t i = 0; i < 64; ++i) {
    batch.tokens.push_back((i * 37 + 11) % 250);
    const int32_t position = i % 32;
    const bool counted = i < 32 ? position < 30 : position < 3;
    batch.labels.push_back(counted ? (i * 53 + 5) % 250 : -1);
  }
  return batch;
}

std::vector<Batch> split(const Batch& batch, size_t parts) {
  std::vector<Batch> out(parts);
  const size_t n = batch.tokens.size() / parts;
  for (size_t i = 0; i < parts; ++i) {
    const auto from = static_cast<std::ptrdiff_t>(i * n);
    const auto to = static_cast<std::ptrdiff_t>((i + 1) * n);
    out[i].tokens.assign(batch.tokens.begin() + from, batch.tokens.begin() + to);
    out[i].labels.assign(batch.labels.begin() + from, batch.labels.begin() + to);
  }
  return out;
}

struct Outcome {
  double loss = 0;
  std::vector<float> gradient;  // of the embedding
};

// One step over the batch in `data` × `micro_steps` parts; with `mean_of_means` the wrong rule, each part divided by
// its own count of labels.
Outcome run_unequal(int data, size_t micro_steps, bool mean_of_means) {
  const ReferenceCase reference = qwen3_case();
  Config config = reference.config();
  config.parallel.data = data;
  config.train.micro_batch_size = static_cast<int64_t>(2 / (static_cast<size_t>(data) * micro_steps));
  Outcome outcome;
  run_thread_ranks(data, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {1, data});
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()), poisoned_weights);
    initialise(state.parameters(), stream, 5, 0.02);
    state.adopt_values();
    const Batch mine = split(unequal_batch(), static_cast<size_t>(data))[static_cast<size_t>(world.rank())];
    const std::vector<Batch> batches = split(mine, micro_steps);
    const Weight& embedding = state.parameters().weight(0);
    std::vector<float> gradient(static_cast<size_t>(embedding.gradient.numel()));
    const auto keep = [&] {
      for (const auto& piece : state.ownership().pieces()) {
        const Range own = intersect(piece.elements, embedding.elements());
        const std::vector<float> values = read_f32(stream, state.parameters().flat_gradients(), own);
        std::copy(values.begin(), values.end(), gradient.begin() + (own.begin - embedding.offset));
      }
      const Tensor view(gradient.data(), DType::kF32, DeviceType::kCpu, {std::ssize(gradient)});
      world.all_reduce(stream, view, ReduceOp::kSum);
    };
    double loss = 0;
    if (mean_of_means) {
      state.zero_gradients();
      const auto parts = static_cast<float>(static_cast<size_t>(data) * micro_steps);
      for (const Batch& batch : batches) {
        const auto count = std::count_if(batch.labels.begin(), batch.labels.end(), [](int32_t l) { return l >= 0; });
        state.forward_backward(batch, 1.0f / (parts * static_cast<float>(count)));
        loss += state.take_loss().value() / (parts * static_cast<float>(count));
      }
      state.finish_gradients();
      keep();
      loss = all_reduce_value(world, loss, ReduceOp::kSum);
    } else {
      StepHooks hooks;
      hooks.gradients_complete = [&](const StepResult&) { keep(); };
      loss = run_step(state, config, groups, batches, 0, hooks).loss;
    }
    if (world.rank() == 0) outcome = {loss, gradient};
  });
  return outcome;
}

double distance(const Outcome& a, const Outcome& b) {
  double worst = std::abs(a.loss - b.loss);
  for (size_t i = 0; i < a.gradient.size(); ++i)
    worst = std::max(worst, std::abs(double{a.gradient[i]} - b.gradient[i]));
  return worst;
}

}  // namespace

TEST_CASE("with unequal label counts every split of a batch gives one loss and gradient; a mean of means does not") {
  const Outcome whole = run_unequal(1, 1, false);
  CHECK(distance(whole, run_unequal(1, 2, false)) < 1e-6);
  CHECK(distance(whole, run_unequal(2, 1, false)) < 1e-6);
  CHECK(distance(whole, run_unequal(1, 2, true)) > 1e-4);
  CHECK(distance(whole, run_unequal(2, 1, true)) > 1e-4);
}
