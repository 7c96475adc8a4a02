#pragma once

#include <optional>

#include "layers/vocab_embedding.h"

namespace invar {

// Output projection fused with vocab-parallel cross entropy. Logits exist for one chunk of tokens at a time; the
// gradient is taken in the same pass, so backward costs no second projection.
class LmHead {
 public:
  // logits = softcap · tanh(x Wᵀ / softcap); 0: x Wᵀ.
  explicit LmHead(const VocabTable& table, double softcap = 0) : table_(table), softcap_(static_cast<float>(softcap)) {}

  // x (local, C), labels i32 (T), negative = not counted. Adds Σ loss of the counted tokens, equal on all ranks of the
  // tensor group, to loss_sum f64 (1). With gradient_scale, adds the weight's gradient of gradient_scale times that sum
  // and returns d_x (local, C).
  Tensor loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels, std::optional<float> gradient_scale,
              const Tensor& loss_sum) const;

  // Padded vocabulary rows of this rank; columns of the logits handed to a sink.
  Range vocabulary() const { return table_.rows; }

 private:
  struct Chunk {
    Tensor x;       // (n, C)
    Tensor labels;  // (n)
    Tensor d_x;     // (n, C) partial sums, if a gradient was asked for
  };
  void chunk_loss(const LayerContext& ctx, const Chunk& chunk, int64_t first_token, std::optional<float> gradient_scale,
                  const Tensor& loss_sum) const;

  VocabTable table_;
  float softcap_;
};

}  // namespace invar
