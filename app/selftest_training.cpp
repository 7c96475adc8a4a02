#include <array>

#include "app/commands.h"
#include "app/layout_matrix.h"
#include "app/rank_device.h"
#include "app/selftest.h"
#include "comm/thread_communicator.h"
#include "config/field.h"
#include "config/validation.h"
#include "core/philox.h"
#include "train/dry_run.h"
#include "train/run_contract.h"

namespace invar::app {
namespace {

// Sizes that tensor degrees up to 8 cut; with 8 two ranks hold a KV head.
Config tiny_qwen3(Precision precision) {
  Config config;
  config.model.vocab_size = 500;
  config.model.hidden_size = 96;
  config.model.intermediate_size = 320;
  config.model.num_hidden_layers = 2;
  config.model.num_attention_heads = 8;
  config.model.num_key_value_heads = 4;
  config.model.head_dim = 64;
  config.model.rope_theta = 1e4;
  config.parallel.bucket_size = 20'000;  // several buckets
  config.numerics.precision = precision;
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 4;
  config.train.sequence_length = 48;
  config.train.global_batch_size = 4;
  config.optimizer.lr = 1e-3;
  config.schedule.kind = ScheduleKind::kConstant;
  return config;
}

// All that its layers can have, in one model.
Config tiny_gemma4(Precision precision) {
  Config config = tiny_qwen3(precision);
  ModelConfig& model = config.model;
  model.family = "gemma4";
  model.tie_word_embeddings = true;
  model.num_hidden_layers = 6;
  model.layer_types = "ssf";
  model.sliding_window = 5;
  model.rope_theta = 1e6;
  model.partial_rotary_factor = 0.5;
  model.global_head_dim = 128;
  model.num_global_key_value_heads = 4;
  model.attention_k_eq_v = true;
  model.num_kv_shared_layers = 3;
  model.use_double_wide_mlp = true;
  model.hidden_size_per_layer_input = 64;
  model.final_logit_softcapping = 30;
  return config;
}

struct Model {
  const char* name;
  Config (*config)(Precision);
};
constexpr std::array kModels = {Model{"Qwen3", tiny_qwen3}, Model{"Gemma 4", tiny_gemma4}};

struct Numerics {
  const char* name;
  Precision precision;
  Precision leaf;  // what leaves are rounded to
};
constexpr std::array kNumerics = {Numerics{"fp32", Precision::kF32, Precision::kF32},
                                  Numerics{"bf16", Precision::kBF16, Precision::kF32},
                                  Numerics{"bf16, rounded leaves", Precision::kBF16, Precision::kBF16}};

Config config_of(const Model& model, const Numerics& numerics, DeviceChoice device) {
  Config config = model.config(numerics.precision);
  config.numerics.tensor_reduce_dtype = numerics.leaf;
  config.device = device;
  return config;
}

std::string describe(const Layout& layout) {
  const bool recomputes = layout.recompute != RecomputeKind::kNone;
  return format("tensor {}{} data {} micro-batch {}{}", layout.tensor, layout.sequence ? " sequence" : "", layout.data,
                layout.micro_batch, recomputes ? format(" recompute {}", word_of(layout.recompute)) : "");
}

Trajectory train_rank(const Config& config, const ProcessGroups& groups, const Stream& stream, int64_t steps) {
  TrainState state(config, groups, stream,
                   measure_memory(config, groups.topology, groups.world->rank(), stream.device()));
  initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
  state.adopt_values();
  const auto source = make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()));
  const DataStream data = data_stream(*source, config, Split::kTrain);
  Trajectory trajectory;
  for (int64_t step = 0; step < steps; ++step) {
    StepHash hash(state, groups);
    StepHooks hooks;
    hooks.gradients_complete = [&](const StepResult&) { hash.gradients(); };
    const StepResult result =
        run_step(state, config, groups, load_micro_batches(config, groups, data, step), step, hooks);
    trajectory.push_back(hash.finish().digest(result.loss, result.grad_norm));
  }
  return trajectory;
}

Trajectory train(Config config, const Layout& layout, int64_t steps) {
  layout.apply_to(config);
  config.train.steps = steps;
  validate(config, layout.ranks());
  Trajectory trajectory;
  run_thread_ranks(layout.ranks(), [&](Communicator& world) {
    const RankDevice device = open_thread_device(config, world, threads_per_rank(layout.ranks()));
    const ProcessGroups groups = make_process_groups(*device.world, {layout.tensor, layout.data});
    Trajectory mine = train_rank(config, groups, device.stream, steps);
    if (world.rank() == 0) trajectory = std::move(mine);
  });
  return trajectory;
}

// Every layout against the first one, whose trajectory is returned.
Trajectory check_layouts(SelftestReport& report, const std::string& name, const Config& config, int64_t steps) {
  const std::array layouts = {Layout{1, false, 1, 2},
                              Layout{2, true, 1, 1},
                              Layout{2, true, 2, 2, RecomputeKind::kSelective},
                              Layout{4, false, 1, 2},
                              Layout{4, true, 1, 1, RecomputeKind::kFull},
                              Layout{8, true, 1, 2}};
  Trajectory one;
  report.check(format("{}: {}", name, describe({})), [&] {
    one = train(config, {}, steps);
    return difference(train(config, {}, steps), one);
  });
  if (one.empty()) return one;
  report.check(format("{}: {}", name, describe({1, false, 2, 1})), [&] {
    return difference(train(config, {1, false, 2, 1}, steps), one);
  });
  for (const Layout& layout : layouts) {
    report.check(format("{}: {}", name, describe(layout)),
                 [&] { return difference(train(config, layout, steps), one); });
  }
  report.check(format("{}: control: fast, tensor 1 and 4 differ", name), [&] {
    Config fast = config;
    fast.numerics = {config.numerics.precision, Reduction::kFast};
    const bool differ = !difference(train(fast, {4}, steps), train(fast, {}, steps)).empty();
    return differ ? std::string() : "the same states";
  });
  return one;
}

}  // namespace

std::string difference(const Trajectory& actual, const Trajectory& expected) {
  if (actual.size() != expected.size()) return format("{} steps, expected {}", actual.size(), expected.size());
  for (size_t step = 0; step < actual.size(); ++step) {
    if (actual[step].combined == expected[step].combined && actual[step].kinds == expected[step].kinds) continue;
    std::string kinds;
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      if (actual[step].kinds[kind] == expected[step].kinds[kind]) continue;
      kinds += format("{}{}", kinds.empty() ? "" : ", ", kStateKindNames[kind]);
    }
    return format("step {}: {}", step + 1, kinds.empty() ? "loss or gradient norm" : kinds);
  }
  return "";
}

void check_training(SelftestReport& report, DeviceChoice device, int64_t steps) {
  const DeviceType on_device = device == DeviceChoice::kCuda ? DeviceType::kCuda : DeviceType::kCpu;
  std::string states, rounded_states;
  for (const Model& model : kModels) {
    for (const Numerics& numerics : kNumerics) {
      const Config config = config_of(model, numerics, device);
      const std::string name = format("{} {}", model.name, numerics.name);
      for (const StateDigest& digest : check_layouts(report, name, config, steps)) {
        (numerics.leaf == Precision::kF32 ? states : rounded_states) += hash_text(digest.combined);
      }
    }
  }
  for (const Numerics& numerics : kNumerics) {  // the same of both models
    const Config config = config_of(kModels.front(), numerics, device);
    report.tell(format("numerics contract, {}", numerics.name), run_contract(config, on_device, 0)->describe());
  }
  report.tell("states of all models, layouts and steps", hash_text(hash_name(states)));
  report.tell("the same with rounded leaves", hash_text(hash_name(rounded_states)));
}

}  // namespace invar::app
