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

  struct Result {
    double loss_sum = 0;  // Σ over the micro-batch's counted tokens, equal on all ranks of the tensor group
    Tensor d_x;           // (local, C), if a gradient was asked for
  };

  // x (local, C), labels i32 (T), negative = not counted. With gradient_scale, adds the weight's gradient of
  // gradient_scale · loss_sum and returns d_x.
  Result loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels,
              std::optional<float> gradient_scale) const;

  // Padded vocabulary rows of this rank; columns of the logits handed to a sink.
  Range vocabulary() const { return table_.rows; }

 private:
  struct Chunk {
    Tensor x;       // (n, C)
    Tensor labels;  // (n)
    Tensor d_x;     // (n, C) partial sums, if a gradient was asked for
  };
  double chunk_loss(const LayerContext& ctx, const Chunk& chunk, int64_t first_token,
                    std::optional<float> gradient_scale) const;

  VocabTable table_;
  float softcap_;
};

}  // namespace invar
