#include "models/model_flops.h"

#include <algorithm>

#include "config/units.h"

namespace invar {
namespace {

double real(int64_t value) {
  return static_cast<double>(value);
}

// Of QKᵀ and of the product with V, per token and q column.
double visible_keys(int64_t window, int64_t sequence_length) {
  const double s = real(sequence_length);
  const double w = window == 0 ? s : real(std::min(window, sequence_length));
  return w - w * w / (2 * s);
}

// Multiply-adds per token.
double layer_cost(const LayerSpec& layer, int64_t hidden_size, int64_t sequence_length) {
  const AttentionSpec& attention = layer.attention;
  const double hidden = real(hidden_size);
  const double q_width = real(attention.query_heads * attention.head_dim);
  const double kv_width = real(attention.kv_heads * attention.head_dim);
  const double kv_projections = attention.borrows ? 0 : (attention.values_from_keys ? 1 : 2);
  const double projections = hidden * (2 * q_width + kv_projections * kv_width);
  const double mlp = 3 * hidden * real(layer.mlp.intermediate_size);
  const double per_layer = 2 * hidden * real(layer.per_layer.width);
  return projections + mlp + per_layer + 2 * visible_keys(attention.window, sequence_length) * q_width;
}

}  // namespace

double model_flops_per_step(const DecoderSpec& spec, int64_t sequences, int64_t sequence_length) {
  const double hidden = real(spec.hidden_size);
  double per_token = hidden * real(padded_vocab_size(spec.vocab_size));
  per_token += hidden * real(spec.per_layer.layers * spec.per_layer.width);
  for (const LayerSpec& layer : spec.layers) per_token += layer_cost(layer, spec.hidden_size, sequence_length);
  // Forward, input gradient and weight gradient each cost 2 FLOPs for one multiply-add: hence 6.
  return 6 * real(sequences) * real(sequence_length) * per_token;
}

}  // namespace invar
