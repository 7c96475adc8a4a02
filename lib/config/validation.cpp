#include "config/validation.h"

#include <array>

#include "config/contract.h"
#include "config/field.h"
#include "config/refuse.h"
#include "config/resolved.h"
#include "config/split.h"
#include "config/validate_model.h"
#include "config/validate_parallel.h"

namespace invar {
namespace {

void check_train(const Config& config) {
  const TrainConfig& train = config.train;
  check_required(config, "train.steps");
  check_required(config, "train.sequence_length");
  check_count(config, "train.steps", train.steps, 1);
  check_count(config, "train.sequence_length", train.sequence_length, 1);
  check_count(config, "train.micro_batch_size", train.micro_batch_size, 1);
  check_count(config, "train.global_batch_size", train.global_batch_size, 0, kMostSamplesOfStep);
  check_count(config, "train.eval_every", train.eval_every, 0);
  check_count(config, "train.eval_batches", train.eval_batches, 1);
  check_count(config, "train.exit_after_steps", train.exit_after_steps, 0);
  check_not_negative(config, "train.exit_after_minutes", train.exit_after_minutes, UsedAs::kF64);
  check_not_negative(config, "train.spike_zscore", train.spike_zscore, UsedAs::kF64);
  if (train.sequence_length > config.model.max_position_embeddings) {
    refuse(config, {"train.sequence_length"},
           format("train.sequence_length = {} exceeds model.max_position_embeddings = {}", train.sequence_length,
                  config.model.max_position_embeddings),
           format("use at most {}, or raise model.max_position_embeddings", config.model.max_position_embeddings));
  }
  if (train.micro_batch_size > kMostTokens / train.sequence_length) {
    refuse(config, {"train.micro_batch_size", "train.sequence_length"},
           format("train.micro_batch_size · train.sequence_length = {} · {} exceeds {} tokens", train.micro_batch_size,
                  train.sequence_length, kMostTokens),
           "a micro-batch lies in the memory of a rank: use a smaller one");
  }
  if (train.eval_every == 0) refuse_if_set(config, "train.eval_batches", "with train.eval_every: 0");
}

// What can be judged of the contract without the layout.
void check_numerics(const Config& config) {
  constexpr int64_t kMostTerms = 1024;  // of a tree
  check_count(config, "numerics.leaves", config.numerics.leaves, 1, kMostTerms);
  check_count(config, "numerics.workers", config.numerics.workers, 1, kMostTerms);
  if (config.numerics.precision == Precision::kF32) {
    refuse_if_set(config, "numerics.tensor_reduce_dtype", "with numerics.precision: fp32");
  }
  if (config.numerics.reduction == Reduction::kFast) {
    refuse_if_set(config, "numerics.leaves", "with numerics.reduction: fast");
    refuse_if_set(config, "numerics.workers", "with numerics.reduction: fast");
    return;
  }
  if (config.train.micro_batch_size > kMostMicroBatch) {
    refuse(
        config, {"train.micro_batch_size", "numerics.reduction"},
        format("train.micro_batch_size = {} exceeds {}, the most samples that numerics.reduction: invariant adds at a "
               "time",
               config.train.micro_batch_size, kMostMicroBatch),
        "use a smaller one: the bits do not depend on it");
  }
  const auto fits = [](int64_t length) { return length % token_block_of(length) == 0; };
  const int64_t length = config.train.sequence_length;
  if (fits(length)) return;
  int64_t below = length - 1;
  while (!fits(below)) --below;
  int64_t above = length + 1;
  while (!fits(above)) ++above;
  const bool may_grow = above <= config.model.max_position_embeddings;
  refuse(config, {"train.sequence_length", "numerics.reduction"},
         format("train.sequence_length = {} is no multiple of {} tokens, its {}th part rounded up, by which "
                "numerics.reduction: invariant sums the gradients of norms",
                length, token_block_of(length), kTokenBlocks),
         may_grow ? format("use {} or {}", below, above) : format("use {}", below));
}

void check_optimizer(const Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  check_not_negative(config, "optimizer.lr", optimizer.lr);
  check_fraction(config, "optimizer.beta1", optimizer.beta1);
  check_fraction(config, "optimizer.beta2", optimizer.beta2);
  check_positive(config, "optimizer.eps", optimizer.eps);
  check_not_negative(config, "optimizer.weight_decay", optimizer.weight_decay);
  check_not_negative(config, "optimizer.clip_grad", optimizer.clip_grad);
}

// A key of the schedule must be used by its kind; warm-up and decays must fit one after the other.
void check_schedule(const Config& config) {
  const ScheduleConfig& schedule = config.schedule;
  check_count(config, "schedule.warmup_steps", schedule.warmup_steps, 0);
  check_count(config, "schedule.decay_steps", schedule.decay_steps, 0);
  check_count(config, "schedule.wsd_decay_steps", schedule.wsd_decay_steps, 0);
  check_not_negative(config, "schedule.min_lr", schedule.min_lr);
  const std::string with_kind = format("with schedule.kind: {}", word_of(schedule.kind));
  if (schedule.kind != ScheduleKind::kWsd) refuse_if_set(config, "schedule.wsd_decay_steps", with_kind);
  if (schedule.warmup_steps >= config.train.steps) {
    refuse(config, {"schedule.warmup_steps", "train.steps"},
           format("schedule.warmup_steps = {} must be less than train.steps = {}", schedule.warmup_steps,
                  config.train.steps),
           format("use at most {} warm-up steps, or train longer", config.train.steps - 1));
  }
  if (schedule.kind == ScheduleKind::kConstant) {
    refuse_if_set(config, "schedule.decay_steps", with_kind);
    refuse_if_set(config, "schedule.min_lr", with_kind);
    return;
  }
  if (schedule.min_lr > config.optimizer.lr) {
    refuse(config, {"schedule.min_lr", "optimizer.lr"},
           format("schedule.min_lr = {} exceeds optimizer.lr = {}", schedule.min_lr, config.optimizer.lr),
           "lower schedule.min_lr or raise optimizer.lr");
  }
  const int64_t end = decay_steps(config);
  if (schedule.warmup_steps >= end) {
    refuse(config, {"schedule.decay_steps", "schedule.warmup_steps"},
           format("schedule.decay_steps = {} must exceed schedule.warmup_steps = {}", end, schedule.warmup_steps),
           "decay_steps counts from step 0, the warm-up included: raise it, or use auto for train.steps");
  }
  if (schedule.kind != ScheduleKind::kWsd) return;
  if (schedule.wsd_decay_steps == 0) {
    refuse(config, {"schedule.kind"}, "schedule.kind: wsd needs schedule.wsd_decay_steps",
           "set the length of the final decay, often a tenth of train.steps");
  }
  if (schedule.wsd_decay_steps > end - schedule.warmup_steps) {
    refuse(config, {"schedule.wsd_decay_steps"},
           format("schedule.wsd_decay_steps = {} does not fit between schedule.warmup_steps = {} and step {}",
                  schedule.wsd_decay_steps, schedule.warmup_steps, end),
           format("use at most {}", end - schedule.warmup_steps));
  }
}

std::array<double, 3> split_weights(const Config& config) {
  std::array<double, 3> weights{};
  try {
    weights = parse_split(config.data.split);
  } catch (const Error& error) {
    refuse(config, {"data.split"}, error.what(), error.hint());
  }
  if (weights[0] <= 0) {
    refuse(config, {"data.split"}, format("data.split = \"{}\" leaves nothing to train on", config.data.split),
           "give the first weight of data.split, such as \"969, 30, 1\"");
  }
  return weights;
}

// One source by data.path, or several by data.blend.
void check_data_paths(const Config& config) {
  const DataConfig& data = config.data;
  const std::string with_kind = format("with data.kind: {}", word_of(data.kind));
  if (data.kind != DataKind::kMegatron) refuse_if_set(config, "data.cache_dir", with_kind);
  if (data.kind == DataKind::kMock) {
    refuse_if_set(config, "data.path", with_kind);
    refuse_if_set(config, "data.blend", with_kind);
  } else if (!data.blend.empty()) {
    refuse_if_set(config, "data.path", "with data.blend, which names its own");
  } else if (data.path.empty()) {
    refuse(config, {"data.path", "data.kind"},
           format("data.kind: {} needs data.path or data.blend", word_of(data.kind)),
           data.kind == DataKind::kTokens ? "set data.path to the .bin file (tools/tokenise writes one)"
                                          : "set data.path to the path of the .bin and .idx files, without the ending");
  }
}

void check_data_source(const Config& config) {
  const DataConfig& data = config.data;
  const std::string with_kind = format("with data.kind: {}", word_of(data.kind));
  check_data_paths(config);
  if (data.kind != DataKind::kTokens) {
    refuse_if_set(config, "data.token_dtype", with_kind);
  } else if (!data.token_dtype.empty() && data.token_dtype != "uint16" && data.token_dtype != "uint32") {
    refuse(config, {"data.token_dtype"}, format("data.token_dtype must be uint16 or uint32, not {}", data.token_dtype),
           "use the type that the file was written with");
  }
  if (data.kind != DataKind::kMegatron) refuse_if_set(config, "data.split", with_kind);
  if (data.kind == DataKind::kMegatron) {
    refuse_if_set(config, "data.validation_fraction", with_kind + " (it has data.split)");
  } else if (data.kind == DataKind::kMock) {
    refuse_if_set(config, "data.validation_fraction", with_kind + " (random tokens of their own are evaluated)");
  }
  check_fraction(config, "data.validation_fraction", data.validation_fraction, UsedAs::kF64);
  if (data.kind != DataKind::kMock) refuse_if_set(config, "data.mock_vocab_size", with_kind);
  if (data.mock_vocab_size < 0 || data.mock_vocab_size > config.model.vocab_size) {
    refuse(config, {"data.mock_vocab_size", "model.vocab_size"},
           format("data.mock_vocab_size = {} must be from 1 to model.vocab_size = {}", data.mock_vocab_size,
                  config.model.vocab_size),
           "or 0 for the whole vocabulary");
  }
  if (data.eod_id < -1 || data.eod_id >= config.model.vocab_size) {
    refuse(config, {"data.eod_id", "model.vocab_size"},
           format("data.eod_id = {} is not a token of model.vocab_size = {}", data.eod_id, config.model.vocab_size),
           format("use 0 to {}, or auto", config.model.vocab_size - 1));
  }
  if (!data.eod_mask_loss && !data.reset_at_eod) {
    refuse_if_set(config, "data.eod_id", "with data.eod_mask_loss: false and data.reset_at_eod: false");
  }
}

void check_evaluation(const Config& config) {
  const bool has_validation = has_validation_data(config);  // also where none is asked for: data.split is judged
  if (config.train.eval_every == 0 || has_validation) return;
  if (config.data.kind == DataKind::kMegatron) {
    refuse(config, {"train.eval_every", "data.split"},
           format("train.eval_every = {} needs validation data, but data.split = \"{}\" keeps none",
                  config.train.eval_every, config.data.split),
           "give the second weight of data.split, such as \"969, 30, 1\", or set train.eval_every: 0");
  }
  refuse(
      config, {"train.eval_every"},
      format("train.eval_every = {} needs validation data, but data.validation_fraction is 0", config.train.eval_every),
      "set data.validation_fraction, such as 0.05, or train.eval_every: 0");
}

// One step of the run, or none.
void check_step(const Config& config, std::string_view key, int64_t step) {
  check_count(config, key, step, 0);
  if (step <= config.train.steps) return;
  refuse(config, {key, "train.steps"}, format("{} = {} is beyond train.steps = {}", key, step, config.train.steps),
         format("use 1 to {}, or 0 for none", config.train.steps));
}

void check_dump(const Config& config) {
  const int64_t step = config.log.dump_step;
  check_step(config, "log.dump_step", step);
  if (step > 0 && config.log.dir.empty()) {
    refuse(config, {"log.dump_step"}, format("log.dump_step = {} needs log.dir", step),
           "set log.dir, the folder that the dump is written to");
  }
}

void check_hash(const Config& config) {
  const int64_t every = config.log.hash_every;
  check_count(config, "log.hash_every", every, 0);
  if (every > 0 && config.log.dir.empty()) {
    refuse(config, {"log.hash_every"}, format("log.hash_every = {} needs log.dir", every),
           "set log.dir, the folder that the hashes are written to");
  }
  if (every == 0) refuse_if_set(config, "log.hash_blocks", "with log.hash_every: 0");
}

void check_output(const Config& config) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  check_count(config, "checkpoint.every", checkpoint.every, 0);
  check_count(config, "checkpoint.keep", checkpoint.keep, 1);
  check_count(config, "log.every", config.log.every, 1);
  check_dump(config);
  check_step(config, "log.profile_step", config.log.profile_step);
  check_hash(config);
  check_count(config, "checkpoint.keep_every", checkpoint.keep_every, 0);
  if (checkpoint.resume.empty()) {
    refuse(config, {"checkpoint.resume"}, "checkpoint.resume is empty", "use auto, never, or the path of a checkpoint");
  }
  if (!checkpoint_dir(config).empty()) return;
  constexpr const char* kWhereTo = "set checkpoint.dir, or log.dir and checkpoint.every";
  if (checkpoint.every > 0) {
    refuse(config, {"checkpoint.every"}, format("checkpoint.every = {} has no folder to save to", checkpoint.every),
           "set checkpoint.dir, or log.dir, below which it is checkpoints/");
  }
  for (const std::string_view key :
       {"checkpoint.keep", "checkpoint.keep_every", "checkpoint.async", "checkpoint.on_error"}) {
    refuse_if_set(config, key, "as no checkpoints are saved (neither checkpoint.dir nor checkpoint.every is set)");
  }
  if (config.train.exit_after_minutes > 0 || config.train.exit_after_steps > 0) {
    const std::string key = config.train.exit_after_steps > 0 ? "train.exit_after_steps" : "train.exit_after_minutes";
    refuse(config, {key}, format("{} needs a folder for the checkpoint that it saves", key), kWhereTo);
  }
}

void check_comm(const Config& config) {
  constexpr double kLongest = 1e6;
  if (!(config.comm.timeout >= 1 && config.comm.timeout <= kLongest)) {
    refuse(config, {"comm.timeout"},
           format("comm.timeout = {} is not from 1 to {} seconds", config.comm.timeout, kLongest),
           "600 suits most machines");
  }
  if (config.device != DeviceChoice::kCpu) return;
  for (const std::string_view key : {"comm.synchronous", "comm.share_gpus"}) {
    refuse_if_set(config, key, "with device: cpu");
  }
}

}  // namespace

bool has_validation_data(const Config& config) {
  const bool is_megatron = config.data.kind == DataKind::kMegatron;
  return is_megatron ? split_weights(config)[1] > 0
                     : config.data.kind == DataKind::kMock || config.data.validation_fraction > 0;
}

void validate(const Config& config, int launched, std::span<const HostSlot> hosts) {
  INVAR_CHECK(launched > 0, "world size {}", launched);
  validate_model(config);
  check_train(config);
  check_numerics(config);
  validate_parallel(config, launched, hosts);
  check_optimizer(config);
  check_schedule(config);
  check_data_source(config);
  check_evaluation(config);
  check_output(config);
  check_comm(config);
}

}  // namespace invar
