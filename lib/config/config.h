#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/blend.h"

namespace invar {

// The YAML config as plain structs; members carry the YAML names, and their initial values are the defaults.
// yaml_loader.h reads them, validation.h judges them.

enum class Precision : uint8_t { kF32, kBF16 };
enum class Reduction : uint8_t { kFast, kInvariant };
enum class InitKind : uint8_t { kRandom, kHuggingFace };
enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
enum class RecomputeKind : uint8_t { kNone, kSelective, kFull };
enum class ScheduleKind : uint8_t { kConstant, kCosine, kLinear, kWsd };
enum class DataKind : uint8_t { kMock, kTokens, kMegatron };
enum class NonfinitePolicy : uint8_t { kSkip, kStop };
enum class BatchPolicy : uint8_t { kKeep, kShrink };
enum class SaveFailurePolicy : uint8_t { kContinue, kStop };

// Hugging Face field names. 0 means "not given": a preset, hf_path or the explicit field must set it.
struct ModelConfig {
  std::string family = "qwen3";
  std::string preset;
  std::string hf_path;  // a Hugging Face folder: config.json, and the weights if init is hf
  InitKind init = InitKind::kRandom;

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 40960;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e6;  // of the full layers
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;

  // Gemma 4; the defaults switch each of them off.
  std::string layer_types;                  // s (sliding) and f (full), repeated over the layers; empty: all full
  int64_t sliding_window = 0;               // keys that a query of a sliding layer sees, itself included
  double sliding_rope_theta = 1e4;          // of the sliding layers
  int64_t global_head_dim = 0;              // head_dim of the full layers; 0: as the sliding ones
  int64_t num_global_key_value_heads = 0;   // of the full layers; 0: as the sliding ones
  double partial_rotary_factor = 1.0;       // part of a full layer's head that turns
  bool attention_k_eq_v = false;            // full layers take their values from the keys
  int64_t num_kv_shared_layers = 0;         // last layers, which use the keys and values of an earlier one
  bool use_double_wide_mlp = false;         // the sharing layers' MLP has twice the width
  int64_t hidden_size_per_layer_input = 0;  // width of the per-layer embeddings; 0: none
  double final_logit_softcapping = 0;       // logits = c · tanh(logits / c); 0: none

  bool operator==(const ModelConfig&) const = default;
};

using IntegerLists = std::map<std::string, std::vector<int>>;

// Replicas of unequal tensor-parallel width, see replica_plan.h. By `failed`, by `tensor_widths`, or in the form of
// Megatron-LM's nonuniform tensor parallelism (its last four members), which is translated to `failed`.
struct NonuniformConfig {
  std::vector<std::string> failed;  // "dp0.tp5": a slot of the grid tensor · data; "node03.gpu2": host and local rank
  std::vector<int> tensor_widths;   // tensor ranks of each replica
  int min_tensor = 1;               // live ranks below which a replica is dropped
  BatchPolicy batch = BatchPolicy::kKeep;
  std::vector<double> speeds;  // measured micro-batches per second of each replica, relative; empty: modelled
  bool reshare = false;        // by the speeds that the run measures, at a checkpoint

  int tp_base = 0;  // 0: auto, parallel.tensor
  int tp_spares = 0;
  int num_reduced_tp_dp_ranks = 1;
  IntegerLists non_active_ranks_per_dp;  // slots by "dp" or "dp,cp,pp"

  bool operator==(const NonuniformConfig&) const = default;
};

struct ParallelConfig {
  int tensor = 1;
  bool sequence = false;
  int data = 0;  // 0: auto, world / (tensor · gtp)
  int gtp = 1;
  bool uneven = false;
  int64_t bucket_size = 32 << 20;  // elements of a gradient bucket on one tensor rank
  int spare = 0;                   // ranks beyond tensor · data, idle until they step in for failed ones
  NonuniformConfig nonuniform = {};

  bool operator==(const ParallelConfig&) const = default;
};

struct NumericsConfig {
  Precision precision = Precision::kBF16;
  Reduction reduction = Reduction::kFast;
  Precision tensor_reduce_dtype = Precision::kF32;  // of terms of activations' sums over the tensor group, or leaves
  int64_t leaves = 8;                               // invariant: of a sum over a tensor-parallel dim, at most
  int64_t workers = 8;                              // invariant: runs of samples that are added one after another

  bool operator==(const NumericsConfig&) const = default;
};

struct TrainConfig {
  int64_t steps = 0;
  int64_t sequence_length = 0;
  int64_t micro_batch_size = 1;
  int64_t global_batch_size = 0;  // 0: micro_batch_size · data
  uint64_t seed = 1234;
  RecomputeKind recompute = RecomputeKind::kNone;
  int64_t eval_every = 0;    // 0: never
  int64_t eval_batches = 8;  // global batches per evaluation

  double exit_after_minutes = 0;  // of this run; then save and end with code 75; 0: never
  int64_t exit_after_steps = 0;   // the same, in steps of this run
  NonfinitePolicy on_nonfinite = NonfinitePolicy::kStop;
  double spike_zscore = 6.0;  // standard deviations above the mean of recent losses that are reported; 0: never

  bool operator==(const TrainConfig&) const = default;
};

struct OptimizerConfig {
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip_grad = 1.0;  // 0: no clipping

  bool operator==(const OptimizerConfig&) const = default;
};

struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;      // 0: train.steps
  int64_t wsd_decay_steps = 0;  // length of the final decay of wsd
  double min_lr = 0;

  bool operator==(const ScheduleConfig&) const = default;
};

struct DataConfig {
  DataKind kind = DataKind::kMock;
  std::string path;                  // tokens: the .bin file; megatron: the prefix of .bin and .idx
  Blend blend;                       // instead of path: several sources
  std::string cache_dir;             // megatron: where built orders are kept; empty: in memory
  std::string token_dtype;           // tokens without a known header: uint16 | uint32
  int64_t eod_id = -1;               // −1: settle_eod_id() finds it if it is needed
  bool eod_mask_loss = false;        // positions whose input is eod_id do not count in the loss
  bool reset_at_eod = false;         // attention and positions start anew after eod_id
  int64_t mock_vocab_size = 0;       // mock: tokens are below it; 0: model.vocab_size
  double validation_fraction = 0.0;  // tail of the data kept for evaluation (kind tokens)
  std::string split = "969, 30, 1";  // megatron: weights of train, validation, test

  bool operator==(const DataConfig&) const = default;
};

struct CheckpointConfig {
  std::string dir;  // empty: log.dir/checkpoints if `every` is set
  int64_t every = 0;
  int64_t keep = 2;
  int64_t keep_every = 0;  // checkpoints of its multiples stay for good; 0: none
  bool async = true;
  SaveFailurePolicy on_error = SaveFailurePolicy::kContinue;
  std::string resume = "auto";  // auto | never | PATH
  std::string export_dir;       // Hugging Face folder written at the end of training; empty: none

  bool operator==(const CheckpointConfig&) const = default;
};

struct LogConfig {
  std::string dir;
  int64_t every = 1;
  int64_t dump_step = 0;     // 0: never
  int64_t profile_step = 0;  // 0: never
  int64_t hash_every = 0;    // 0: never
  bool hash_blocks = false;

  bool operator==(const LogConfig&) const = default;
};

struct CommConfig {
  double timeout = 600;      // seconds for a collective, after which the job ends
  bool synchronous = false;  // every collective on GPUs waits until it is done: for debugging
  bool share_gpus = false;   // ranks of a host may take the same GPU: for trying layouts

  bool operator==(const CommConfig&) const = default;
};

struct Config {
  ModelConfig model;
  ParallelConfig parallel;
  NumericsConfig numerics;
  DeviceChoice device = DeviceChoice::kAuto;
  TrainConfig train;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  DataConfig data;
  CheckpointConfig checkpoint;
  LogConfig log;
  CommConfig comm;

  // For messages: where each given key came from, "qwen3.yaml:12" or "argument train.steps=5"; by "" the file itself.
  // By "model" the config.json of model.hf_path, where the keys of this section come from that were not given.
  std::map<std::string, std::string> origin;

  bool operator==(const Config&) const = default;
};

}  // namespace invar
