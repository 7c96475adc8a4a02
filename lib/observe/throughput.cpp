#include "observe/throughput.h"

#include <limits>

namespace invar {

double model_flops_per_step(const ModelConfig& model, int64_t padded_vocab_size, int64_t sequences,
                            int64_t sequence_length) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double hidden = real(model.hidden_size);
  const double layers = real(model.num_hidden_layers);
  const double q_width = real(model.num_attention_heads * model.head_dim);
  const double kv_width = real(model.num_key_value_heads * model.head_dim);
  const double tokens = real(sequences) * real(sequence_length);

  // Multiply-adds per token. Forward, input gradient and weight gradient each cost 2 FLOPs for one: hence 6.
  const double mlp = 3 * hidden * real(model.intermediate_size);
  const double projections = hidden * (q_width + 2 * kv_width) + q_width * hidden;
  const double head = hidden * real(padded_vocab_size);
  // QKᵀ and the product with V: 2 · S multiply-adds per token and q column, of which the causal mask leaves half.
  const double attention = real(sequence_length) * q_width;
  return 6 * tokens * (layers * (mlp + projections + attention) + head);
}

void Throughput::record(double seconds, int64_t tokens) {
  constexpr double kWeight = 0.1;  // of the newest step
  seconds_ = seconds;
  tokens_ = tokens;
  ++steps_;
  if (steps_ <= 2) {
    average_seconds_ = seconds;
  } else {
    average_seconds_ += kWeight * (seconds - average_seconds_);
  }
}

double Throughput::tokens_per_s() const {
  return seconds_ > 0 ? static_cast<double>(tokens_) / seconds_ : 0;
}

double Throughput::tflops_per_device() const {
  return seconds_ > 0 ? flops_per_step_ / (seconds_ * 1e12 * devices_) : 0;
}

double Throughput::seconds_left(int64_t steps_left) const {
  if (steps_ < 2) return std::numeric_limits<double>::quiet_NaN();
  return average_seconds_ * static_cast<double>(steps_left);
}

}  // namespace invar
