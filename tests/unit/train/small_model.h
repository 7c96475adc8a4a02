#pragma once

#include "config/config.h"

namespace invar::test {

// Trains in milliseconds on two tensor-parallel ranks.
inline Config small_model(int64_t layers) {
  Config config;
  config.model.vocab_size = 64;
  config.model.hidden_size = 32;
  config.model.intermediate_size = 64;
  config.model.num_hidden_layers = layers;
  config.model.num_attention_heads = 4;
  config.model.num_key_value_heads = 2;
  config.model.head_dim = 8;
  config.numerics.precision = Precision::kF32;
  config.parallel.tensor = 2;
  config.train.sequence_length = 8;
  return config;
}

}  // namespace invar::test
