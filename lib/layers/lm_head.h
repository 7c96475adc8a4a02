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

  // x (local, C), labels i32 (T), negative = not counted. Adds each sample's Σ loss of the counted tokens, equal on all
  // ranks of the tensor group, to loss_sums f64 (samples). With gradient_scale, adds the weight's gradient of
  // gradient_scale times the sum of these and returns d_x (local, C).
  Tensor loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels, std::optional<float> gradient_scale,
              const Tensor& loss_sums) const;

  // Padded vocabulary rows of this rank; columns of the logits handed to a sink.
  Range vocabulary() const { return table_.rows; }

 private:
  // Tokens whose logits exist at a time.
  struct Chunk {
    Range tokens;
    Tensor x;                     // (n, C)
    Tensor labels;                // (n)
    Tensor logits;                // f32 (n, vocabulary of this rank)
    Tensor maximum, sum, target;  // f32 (n), over the whole vocabulary
  };
  Chunk make_logits(const LayerContext& ctx, const Tensor& weight, Range tokens, const Tensor& x,
                    const Tensor& labels) const;
  void add_losses(const LayerContext& ctx, const Chunk& chunk, const Tensor& loss_sums) const;
  void chunk_gradient(const LayerContext& ctx, const Tensor& weight, const Chunk& chunk, float scale,
                      CutProduct& d_x) const;

  VocabTable table_;
  float softcap_;
};

}  // namespace invar
