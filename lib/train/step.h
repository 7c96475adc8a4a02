#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "train/train_state.h"

namespace invar {

// The order of training data: a source and the order of its samples.
struct DataStream {
  const TokenSource& source;
  Sampler sampler;
  int64_t first_sample = 0;  // global position of step 0, as BatchGeometry has it
};

// What a run asks of its data, and its order.
TokenRequest token_request(const Config& config, Split split, int world_size);
DataStream data_stream(const TokenSource& source, const Config& config, Split split);

struct StepResult {
  double loss = 0;       // mean over the step's counted tokens, before the update; NaN if there is none
  double grad_norm = 0;  // before clipping
  double lr = 0;
  int64_t tokens = 0;  // counted, over all ranks
  // Where NaN or infinity came up, for a person, if loss or norm of counted tokens is not finite.
  std::string nonfinite;

  // Then nothing was updated.
  bool left_out() const { return tokens == 0 || !nonfinite.empty(); }
};

struct StepHooks {
  TensorSink* sink = nullptr;  // activations of every micro-batch
  // Measures the micro-batches of this rank without what comes from other replicas. New values of the step before are
  // waited for first, not beside the first micro-batch; sums, where they have no queue of their own, all come after the
  // last backward pass, not beside it.
  DeviceTimer* work = nullptr;
  // After the sums over all ranks, before the update and before a loss that is not finite is refused. The result lacks
  // only the learning rate.
  std::function<void(const StepResult&)> gradients_complete;
};

// This data-parallel rank's micro-batches of the global batch of `step`, counted from 0.
std::vector<Batch> load_micro_batches(const Config& config, const ProcessGroups& groups, const DataStream& data,
                                      int64_t step);

// One optimizer step, `step` counted from 0: micro-batches, gradient sums, clip, update, publish. Loss and gradients
// are sums over tokens divided once by the token count of the whole step. Collective over the world. A step without
// counted tokens, or whose loss or norm is not finite, leaves weights and moments as they are, alike on every rank.
StepResult run_step(TrainState& state, const Config& config, const ProcessGroups& groups,
                    std::span<const Batch> batches, int64_t step, const StepHooks& hooks = {});

// Of the samples of a source, those that an evaluation reads: the first ones, at most train.eval_batches global
// batches.
int64_t evaluation_samples(const Config& config, const TokenSource& source, int world_size);

struct Evaluation {
  std::optional<double> loss;  // mean over the counted tokens; none without them
  int64_t tokens = 0;          // counted, over all ranks
  int64_t samples = 0;
};

// The loss of evaluation_samples(), each of them once. The sum over their tokens is divided once, so that it does not
// depend on the batch size. A last global batch that they do not fill is filled up with samples that do not count.
// stop, collective too, is asked after each batch: if it says so, there is no loss. Collective over the world.
std::optional<Evaluation> run_evaluation(TrainState& state, const Config& config, const ProcessGroups& groups,
                                         const DataStream& data, const std::function<bool()>& stop = {});

}  // namespace invar
