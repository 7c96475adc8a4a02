#pragma once

#include "checkpoint/safetensors.h"
#include "observe/log.h"
#include "train/step.h"

namespace invar {

// A training run of one rank: memory, weights, data, the loop, what it prints and leaves behind.
class Trainer {
 public:
  // Opens the data and reads headers of weights. Not collective, so that ranks can agree on a failure before any
  // collective call.
  Trainer(const Config& config, const ProcessGroups& groups, const Stream& stream);

  // Trains to train.steps and exports if asked. Collective over the world. Errors name the step.
  void run(Log& log);

 private:
  struct Output;

  void fill_weights(TrainState& state) const;
  void describe(Log& log, const MemorySizes& memory) const;
  void train(TrainState& state, Output& output);
  void train_step(TrainState& state, const DataStream& data, Output& output, int64_t step) const;
  void report(const StepResult& result, double seconds, Output& output, int64_t step) const;
  void evaluate(TrainState& state, Output& output, int64_t step) const;
  void export_weights(const TrainState& state, Log& log) const;

  const Config& config_;
  const ProcessGroups& groups_;
  const Stream& stream_;
  std::unique_ptr<TokenSource> train_source_;
  std::unique_ptr<TokenSource> validation_source_;  // null without evaluation
  std::unique_ptr<SafetensorsReader> weights_;      // null with random weights
};

}  // namespace invar
