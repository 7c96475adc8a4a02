#pragma once

#include <algorithm>

#include "config/config.h"
#include "parallel/topology.h"

namespace invar::test {

struct Layout {
  int tensor = 1;
  bool sequence = false;
  int data = 1;
  int64_t micro_batch = 1;
  RecomputeKind recompute = RecomputeKind::kNone;
  // Of each replica, where they are unequal; tensor is then the widest.
  std::vector<int> widths{};
  std::vector<int64_t> samples{};

  Topology topology() const { return {tensor, data, widths, samples}; }
};

// Replicas of these widths.
inline Layout nonuniform(std::vector<int> widths, std::vector<int64_t> samples, bool sequence, int64_t micro_batch,
                         RecomputeKind recompute = RecomputeKind::kNone) {
  const int widest = *std::max_element(widths.begin(), widths.end());
  const auto replicas = static_cast<int>(widths.size());
  return {widest, sequence, replicas, micro_batch, recompute, std::move(widths), std::move(samples)};
}

inline void use_layout(Config& config, const Layout& layout) {
  config.parallel.tensor = layout.tensor;
  config.parallel.sequence = layout.sequence;
  config.parallel.data = layout.data;
  config.train.micro_batch_size = layout.micro_batch;
  config.train.recompute = layout.recompute;
}

// Sizes that no layout divides without a rest.
inline Config awkward_model(Precision precision) {
  Config config;
  config.model.vocab_size = 71;
  config.model.hidden_size = 40;
  config.model.intermediate_size = 54;
  config.model.num_hidden_layers = 2;
  config.model.num_attention_heads = 6;
  config.model.num_key_value_heads = 3;
  config.model.head_dim = 10;
  config.model.rope_theta = 1e4;
  config.parallel.uneven = true;
  config.parallel.bucket_size = 1500;  // several buckets of several weights
  config.numerics.precision = precision;
  config.train.steps = 4;
  config.train.sequence_length = 21;
  config.train.global_batch_size = 12;
  config.train.eval_batches = 2;
  config.optimizer.lr = 1e-2;
  config.schedule.kind = ScheduleKind::kConstant;
  return config;
}

// All that Gemma 4's sizes have, in one model: no released one has per-layer inputs and K = V.
inline Config awkward_gemma4(Precision precision) {
  Config config = awkward_model(precision);
  ModelConfig& model = config.model;
  model.family = "gemma4";
  model.tie_word_embeddings = true;
  model.num_hidden_layers = 6;
  model.layer_types = "ssf";
  model.sliding_window = 7;
  model.rope_theta = 1e6;
  model.partial_rotary_factor = 0.5;
  model.global_head_dim = 14;
  model.num_global_key_value_heads = 2;
  model.attention_k_eq_v = true;
  model.num_kv_shared_layers = 3;
  model.use_double_wide_mlp = true;
  model.hidden_size_per_layer_input = 24;
  model.final_logit_softcapping = 5;
  config.optimizer.lr = 1e-3;  // its gradients are steep: a longer step would amplify rounding
  return config;
}

}  // namespace invar::test
