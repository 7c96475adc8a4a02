#pragma once

#include "config/config.h"

namespace invar {

// What `auto` stands for, once validate() has accepted the config.

// Replicas of the model in a world of this many ranks: ranks that hold the same shard.
inline int replica_degree(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  return parallel.data != 0 ? parallel.data : world_size / (parallel.tensor * parallel.gtp);
}

// Groups of ranks that read samples of their own: the ranks of generalised tensor parallelism do, though they share the
// weights of one replica.
inline int reader_degree(const Config& config, int world_size) {
  return replica_degree(config, world_size) * config.parallel.gtp;
}

// Samples per optimizer step.
inline int64_t global_batch_size(const Config& config, int world_size) {
  const TrainConfig& train = config.train;
  return train.global_batch_size != 0 ? train.global_batch_size
                                      : train.micro_batch_size * reader_degree(config, world_size);
}

// The finished steps at which the rate has reached min_lr. Step k, from 1, has k − 1 finished ones behind it: if this
// is train.steps, the last step stands one before the end of the decay.
inline int64_t decay_steps(const Config& config) {
  return config.schedule.decay_steps != 0 ? config.schedule.decay_steps : config.train.steps;
}

// The folder that checkpoints are saved to; empty: none are.
inline std::string checkpoint_dir(const Config& config) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  if (!checkpoint.dir.empty() || checkpoint.every == 0 || config.log.dir.empty()) return checkpoint.dir;
  return config.log.dir + "/checkpoints";
}

}  // namespace invar
