#pragma once

#include "checkpoint/hf_weights.h"
#include "observe/log.h"
#include "train/anomaly.h"
#include "train/replica_work.h"
#include "train/run_checkpoints.h"
#include "train/step_hash.h"
#include "train/stop_control.h"

namespace invar {

enum class Ending : uint8_t {
  kDone,     // trained to train.steps
  kStopped,  // by a signal or train.exit_after_*, with a checkpoint to go on from
  kReshare,  // the same, for replicas to share the batch by ReplicaWork::speeds()
};

// A training run of one rank: memory, weights, data, the loop, what it prints and leaves behind.
class Trainer {
 public:
  // Opens the data, the checkpoint to resume from, and headers of weights. Not collective, so that ranks can agree on a
  // failure before any collective call. work: measured and told if given; on all ranks.
  Trainer(const Config& config, const ProcessGroups& groups, const Stream& stream, StopControl& stop,
          ReplicaWork* work = nullptr);

  // Trains to train.steps and exports if asked, or ends earlier. Collective over the world. Errors name the step.
  Ending run(Log& log);

 private:
  struct Output;

  void fill_weights(TrainState& state) const;
  void describe(Log& log, const MemorySizes& memory) const;
  Ending train(TrainState& state, Output& output);
  std::string train_step(TrainState& state, const DataStream& data, Output& output);
  bool should_reshare(const Output& output, std::string& stop);
  void report(const StepResult& result, double seconds, const StateHash* hash, Output& output) const;
  void compare_copies(const StepResult& result, Output& output);
  void report_anomalies(const StepResult& result, Output& output) const;
  std::string evaluate(TrainState& state, Output& output) const;
  void export_weights(const TrainState& state, Log& log) const;

  const Config& config_;
  const ProcessGroups& groups_;
  const Stream& stream_;
  std::unique_ptr<TokenSource> train_source_;
  std::unique_ptr<TokenSource> validation_source_;  // null without evaluation
  std::unique_ptr<HfWeights> weights_;              // null with other weights
  RunCheckpoints checkpoints_;
  std::vector<InputPrint> inputs_;
  std::string document_warning_;
  StopControl& stop_;
  ReplicaWork* work_;
};

}  // namespace invar
