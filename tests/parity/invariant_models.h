#pragma once

#include <bit>
#include <functional>
#include <vector>

#include "awkward_models.h"
#include "checkpoint/hdf5_file.h"
#include "comm/thread_communicator.h"
#include "config/validation.h"
#include "core/philox.h"
#include "core/split_mix.h"
#include "mock_run.h"
#include "support/temporary_folder.h"
#include "train/copy_check.h"
#include "train/step_dump.h"
#include "train/step_hash.h"

namespace invar::test {

// Small models trained with numerics.reduction: invariant, whose weights move and whose gradients are clipped.
inline Config invariant_run(Precision precision) {
  Config config;
  config.model.vocab_size = 300;
  config.model.hidden_size = 48;
  config.model.intermediate_size = 96;
  config.model.num_hidden_layers = 2;
  config.model.rope_theta = 1e4;
  config.numerics.precision = precision;
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 12;
  config.parallel.uneven = true;
  config.parallel.bucket_size = 4000;  // several buckets of several weights
  config.train.steps = 10;
  config.train.sequence_length = 16;
  config.train.global_batch_size = 12;
  config.train.eval_every = 10;
  config.train.eval_batches = 1;
  config.optimizer.lr = 1e-2;
  config.optimizer.clip_grad = 0.25;
  config.schedule.kind = ScheduleKind::kConstant;
  return config;
}

inline Config tied_qwen3(Precision precision) {
  Config config = invariant_run(precision);
  config.model.tie_word_embeddings = true;
  config.model.num_attention_heads = 16;
  config.model.num_key_value_heads = 8;
  config.model.head_dim = 4;
  return config;
}

// Six leaves of its KV heads, twelve of all else.
inline Config untied_qwen3(Precision precision) {
  Config config = invariant_run(precision);
  config.model.num_attention_heads = 12;
  config.model.num_key_value_heads = 6;
  config.model.head_dim = 6;
  config.numerics.leaves = 12;
  return config;
}

// Sliding and full layers, the last two without keys and values of their own, and per-layer embeddings.
inline Config gemma4_e_series(Precision precision) {
  Config config = invariant_run(precision);
  ModelConfig& model = config.model;
  model.family = "gemma4";
  model.tie_word_embeddings = true;
  model.num_hidden_layers = 4;
  model.num_attention_heads = 8;
  model.num_key_value_heads = 8;
  model.head_dim = 4;
  model.layer_types = "sf";
  model.sliding_window = 7;
  model.partial_rotary_factor = 0.5;
  model.global_head_dim = 8;
  model.num_kv_shared_layers = 2;
  model.use_double_wide_mlp = true;
  model.hidden_size_per_layer_input = 24;
  model.final_logit_softcapping = 5;
  return config;
}

// Fewer KV heads in full layers, which take their values from the keys.
inline Config gemma4_dense(Precision precision) {
  Config config = invariant_run(precision);
  ModelConfig& model = config.model;
  model.family = "gemma4";
  model.tie_word_embeddings = true;
  model.num_attention_heads = 12;
  model.num_key_value_heads = 12;
  model.head_dim = 4;
  model.layer_types = "sf";
  model.sliding_window = 7;
  model.partial_rotary_factor = 0.5;
  model.global_head_dim = 8;
  model.num_global_key_value_heads = 6;
  model.attention_k_eq_v = true;
  model.final_logit_softcapping = 5;
  config.numerics.leaves = 6;
  return config;
}

// Fewer KV heads than leaves: the query heads of each are cut in four runs, on up to four ranks with a copy of it.
inline Config grouped_qwen3(Precision precision) {
  Config config = tied_qwen3(precision);
  config.model.num_attention_heads = 8;
  config.model.num_key_value_heads = 2;
  return config;
}

// Runs of two, two and one query heads.
inline Config uneven_qwen3(Precision precision) {
  Config config = untied_qwen3(precision);
  config.model.num_attention_heads = 10;
  config.model.num_key_value_heads = 2;
  config.numerics.leaves = 6;
  return config;
}

// One KV head in full layers, which take their values from the keys, and two in the others.
inline Config grouped_gemma4(Precision precision) {
  Config config = gemma4_e_series(precision);
  config.model.num_key_value_heads = 2;
  config.model.num_global_key_value_heads = 1;
  config.model.attention_k_eq_v = true;
  return config;
}

// What a step leaves: the hash of its state, and what shows that it did something.
struct HashedStep {
  StateDigest digest;
  StepResult result;
};
struct HashedRun {
  std::vector<HashedStep> steps;
  double validation = 0;       // loss after them
  std::vector<uint64_t> dump;  // a hash of each tensor of the first step's dump, if there was one

  // All that must not depend on the layout.
  std::vector<uint64_t> bits() const {
    std::vector<uint64_t> all = dump;
    for (const HashedStep& step : steps) all.push_back(step.digest.combined);
    all.push_back(std::bit_cast<uint64_t>(validation));
    return all;
  }
};

// Of each tensor of the file, in the order of their names.
inline std::vector<uint64_t> hash_dump(const std::filesystem::path& path) {
  const Hdf5Reader file(path);
  std::vector<uint64_t> hashes;
  for (const std::string& name : file.names()) {
    std::vector<double> values(static_cast<size_t>(file.info(name).rows() * file.info(name).cols()));
    file.read_rows<double>(name, {0, file.info(name).rows()}, values);
    uint64_t hash = hash_name(name);
    for (const double value : values) hash = split_mix(hash + std::bit_cast<uint64_t>(value));
    hashes.push_back(hash);
  }
  return hashes;
}

// Trains config.train.steps steps at this layout, which a run must accept. prepare: given each rank's groups, with
// which it may make ranks differ; without it copies are compared after every step.
using PrepareGroups = std::function<void(ProcessGroups& groups)>;
enum class Dump : uint8_t { kNothing, kFirstStep };
inline HashedRun train_hashed(Config config, const Layout& layout, const PrepareGroups& prepare = {},
                              Dump dumped = Dump::kNothing) {
  use_layout(config, layout);
  const TemporaryFolder folder;
  config.log.dir = folder.path().string();
  if (layout.widths.empty()) validate(config, layout.tensor * layout.data);
  HashedRun run;
  run_thread_ranks(layout.topology().world(), [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, layout.topology());
    if (prepare) prepare(groups);
    MockRun rank(config, groups);
    std::optional<CopyCheck> copies;
    if (!prepare) copies.emplace(rank.state, groups, 0);
    for (int64_t step = 0; step < config.train.steps; ++step) {
      StepHash hash(rank.state, groups);
      StepHooks hooks;
      std::optional<StepDump> dump;
      if (step == 0 && dumped == Dump::kFirstStep)
        hooks.sink = &dump.emplace(config, groups, rank.state.model().vocabulary());
      const std::vector<Batch> batches = rank.batches(step);
      hooks.gradients_complete = [&](const StepResult& complete) {
        hash.gradients();
        if (copies) copies->look();
        if (copies) copies->look_at_masters();
        if (!dump) return;
        const std::filesystem::path path = dump->write(rank.state, batches, complete, step + 1);
        if (world.rank() == 0) run.dump = hash_dump(path);
      };
      const StepResult result = run_step(rank.state, config, groups, batches, step, hooks);
      if (copies) copies->look();
      if (copies) copies->compare(step + 1);
      const StateDigest digest = hash.finish().digest(result.loss, result.grad_norm);
      if (world.rank() == 0) run.steps.push_back({digest, result});
    }
    const double validation = run_evaluation(rank.state, config, groups, rank.data).value().loss.value();
    if (world.rank() == 0) run.validation = validation;
  });
  return run;
}

}  // namespace invar::test
