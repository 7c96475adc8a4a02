#pragma once

#include <string>
#include <vector>

#include "layers/gated_mlp.h"
#include "layers/self_attention.h"

namespace invar {

// One decoder layer as data. Families differ in these values and in names, not in classes.
struct LayerSpec {
  std::string input_norm;
  AttentionSpec attention;
  double rope_theta = 1e6;
  std::string post_attention_norm;
  GatedMlpSpec mlp;
  double norm_eps = 1e-6;
};

struct DecoderSpec {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  double norm_eps = 1e-6;
  std::string embedding;
  std::string final_norm;
  std::string head;  // empty: tied to the embedding
  std::vector<LayerSpec> layers;
};

}  // namespace invar
