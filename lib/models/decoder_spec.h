#pragma once

#include <string>
#include <vector>

#include "layers/gated_mlp.h"
#include "layers/per_layer_embedding.h"
#include "layers/self_attention.h"

namespace invar {

// Rotary positions of a layer: which table of angles it uses.
struct RopeSpec {
  double theta = 1e6;
  int64_t head_dim = 0;
  int64_t rotated_pairs = 0;  // of head_dim / 2

  auto operator<=>(const RopeSpec&) const = default;
};

// One decoder layer as data. Families differ in these values and in names, not in classes. Where a name may be empty,
// empty means that the layer has no such part.
struct LayerSpec {
  double norm_eps = 1e-6;
  std::string input_norm;  // before attention
  AttentionSpec attention;
  RopeSpec rope;
  int64_t kv_source = -1;             // the layer whose keys and values it uses, itself or an earlier one
  bool provides_kv = false;           // later layers use its keys and values
  std::string attention_output_norm;  // of what attention adds to the residual stream; may be empty
  std::string mlp_norm;               // before the MLP
  GatedMlpSpec mlp;
  std::string mlp_output_norm;        // may be empty
  PerLayerGateSpec per_layer;         // its names may be empty
  std::string per_layer_output_norm;  // may be empty
  std::string scalar;                 // (1), multiplies the layer's whole output; may be empty
};

struct DecoderSpec {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  double norm_eps = 1e-6;
  std::string embedding;
  double embedding_scale = 1.0;  // rounded to the weights' dtype before use
  int64_t frozen_token = -1;     // whose embedding rows lookups do not train; −1: none
  PerLayerEmbeddingSpec per_layer;
  std::string final_norm;
  std::string head;    // empty: tied to the embedding
  double softcap = 0;  // of the logits; 0: none
  std::vector<LayerSpec> layers;
};

}  // namespace invar
