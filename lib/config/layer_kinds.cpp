#include "config/layer_kinds.h"

#include <cstddef>

namespace invar {

bool is_sliding(const ModelConfig& model, int64_t layer) {
  const std::string& types = model.layer_types;
  return !types.empty() && types[static_cast<size_t>(layer) % types.size()] == 's';
}

int64_t layer_head_dim(const ModelConfig& model, int64_t layer) {
  return model.global_head_dim > 0 && !is_sliding(model, layer) ? model.global_head_dim : model.head_dim;
}

int64_t layer_key_value_heads(const ModelConfig& model, int64_t layer) {
  const int64_t global = model.num_global_key_value_heads;
  return global > 0 && !is_sliding(model, layer) ? global : model.num_key_value_heads;
}

int64_t layer_intermediate_size(const ModelConfig& model, int64_t layer) {
  const bool doubled = model.use_double_wide_mlp && shares_key_values(model, layer);
  return (doubled ? 2 : 1) * model.intermediate_size;
}

bool shares_key_values(const ModelConfig& model, int64_t layer) {
  return layer >= model.num_hidden_layers - model.num_kv_shared_layers;
}

int64_t key_value_source(const ModelConfig& model, int64_t layer) {
  if (!shares_key_values(model, layer)) return layer;
  int64_t source = model.num_hidden_layers - model.num_kv_shared_layers - 1;
  while (source >= 0 && is_sliding(model, source) != is_sliding(model, layer)) --source;
  return source;
}

bool provides_key_values(const ModelConfig& model, int64_t layer) {
  const int64_t first_sharing = model.num_hidden_layers - model.num_kv_shared_layers;
  const auto same_type = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      if (is_sliding(model, i) == is_sliding(model, layer)) return true;
    }
    return false;
  };
  return layer < first_sharing && !same_type(layer + 1, first_sharing) &&
         same_type(first_sharing, model.num_hidden_layers);
}

}  // namespace invar
