#pragma once

#include <memory>

#include "parallel/poisoned_weights.h"
#include "train/dry_run.h"
#include "train/step.h"

namespace invar::test {

// What a rank of a run on made-up data has, on the CPU unless a stream says otherwise: initialised weights, and the
// data in order. A layer that reads a weight outside its handle computes NaN (PoisonedWeights).
struct MockRun {
  // Collective over the world. config and groups must outlive it.
  MockRun(const Config& run_config, const ProcessGroups& run_groups, const Stream& stream = Stream(DeviceType::kCpu))
      : config(run_config),
        groups(run_groups),
        planned(measure_memory(config, groups.topology, groups.world->rank(), stream.device())),
        state(config, groups, stream, planned, poisoned_weights),
        source(make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()))),
        data(data_stream(*source, config, Split::kTrain)) {
    initialise(state.parameters(), state.stream(), config.train.seed, config.model.initializer_range);
    state.adopt_values();
  }

  std::vector<Batch> batches(int64_t step) const { return load_micro_batches(config, groups, data, step); }
  StepResult train(int64_t step, const StepHooks& hooks = {}) {
    return run_step(state, config, groups, batches(step), step, hooks);
  }

  const Config& config;
  const ProcessGroups& groups;
  MemorySizes planned;
  TrainState state;
  std::unique_ptr<TokenSource> source;
  DataStream data;
};

}  // namespace invar::test
