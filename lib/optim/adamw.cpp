#include "optim/adamw.h"

#include "ops/adamw.h"
#include "ops/elementwise.h"

namespace invar {

AdamW::AdamW(const ParameterTable& table, const RowOwnership& ownership, const OptimizerConfig& config, Arena& arena)
    : table_(table), pieces_(ownership.pieces()), buckets_(ownership.buckets().size()), config_(config) {
  const bool masters = table_.flat_values().dtype() != DType::kF32;
  for (const RowOwnership::Piece& piece : pieces_) {
    const int64_t n = piece.elements.size();
    Slice slice;
    slice.value = table_.flat_values().rows(piece.elements.begin, piece.elements.end);
    slice.gradient = table_.flat_gradients().rows(piece.elements.begin, piece.elements.end);
    slice.master = masters ? arena.allocate("master", DType::kF32, {n}) : slice.value;
    slice.exp_avg = arena.allocate("exp_avg", DType::kF32, {n});
    slice.exp_avg_sq = arena.allocate("exp_avg_sq", DType::kF32, {n});
    slice.decay = table_.weight(piece.weight).decay;
    slices_.push_back(slice);
  }
}

void AdamW::adopt_values(const Stream& stream) {
  if (table_.flat_values().dtype() == DType::kF32) return;
  for (const Slice& slice : slices_) ops::copy(stream, slice.value, slice.master);
}

void AdamW::publish_masters(const Stream& stream) const {
  if (table_.flat_values().dtype() == DType::kF32) return;
  for (const Slice& slice : slices_) ops::copy(stream, slice.master, slice.value);
}

std::vector<AdamW::OwnState> AdamW::own_states() const {
  std::vector<OwnState> states;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const Slice& slice = slices_[i];
    states.push_back({pieces_[i].weight, pieces_[i].elements, slice.master, slice.exp_avg, slice.exp_avg_sq});
  }
  return states;
}

void AdamW::update(const Stream& stream, int64_t step, double lr, double gradient_scale,
                   const std::function<void(size_t bucket)>& updated) const {
  ops::AdamWParams params;
  params.lr = static_cast<float>(lr);
  params.beta1 = static_cast<float>(config_.beta1);
  params.beta2 = static_cast<float>(config_.beta2);
  params.eps = static_cast<float>(config_.eps);
  params.gradient_scale = static_cast<float>(gradient_scale);
  params.step = step;
  size_t next = 0;
  for (size_t bucket = 0; bucket < buckets_; ++bucket) {
    for (; next < slices_.size() && pieces_[next].bucket == bucket; ++next) {
      const Slice& slice = slices_[next];
      params.weight_decay = slice.decay ? static_cast<float>(config_.weight_decay) : 0.0f;
      const Tensor rounded = slice.value.dtype() == DType::kF32 ? Tensor() : slice.value;
      ops::adamw_update(stream, params, slice.master, slice.gradient, slice.exp_avg, slice.exp_avg_sq, rounded);
    }
    updated(bucket);
  }
}

}  // namespace invar
