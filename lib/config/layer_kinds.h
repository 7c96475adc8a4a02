#pragma once

#include <cstdint>

#include "config/config.h"

namespace invar {

// What differs between the layers of one model. Layers count from 0; the model must have passed validation. Without
// layer_types every layer is a full one.

bool is_sliding(const ModelConfig& model, int64_t layer);

int64_t layer_head_dim(const ModelConfig& model, int64_t layer);
int64_t layer_key_value_heads(const ModelConfig& model, int64_t layer);

// Width of the layer's MLP: intermediate_size, doubled on the sharing layers of a model with use_double_wide_mlp.
int64_t layer_intermediate_size(const ModelConfig& model, int64_t layer);

// True for the last num_kv_shared_layers layers: they have no key and value weights of their own.
bool shares_key_values(const ModelConfig& model, int64_t layer);

// The layer whose keys and values this one uses: itself, or for a sharing layer the last layer of the same type that
// has its own; −1 if there is none, which validation refuses.
int64_t key_value_source(const ModelConfig& model, int64_t layer);

// True if a later layer uses this one's keys and values.
bool provides_key_values(const ModelConfig& model, int64_t layer);

}  // namespace invar
