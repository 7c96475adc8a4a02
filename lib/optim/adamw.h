#pragma once

#include "config/config.h"
#include "parallel/gradient_sync.h"

namespace invar {

// AdamW on the rows that this data-parallel rank owns (ZeRO-1): both moments and, where the working dtype is not fp32,
// the masters, all fp32. In fp32 the values are their own masters.
class AdamW {
 public:
  // Moments and masters are allocated from `arena`; moments start at zero. The table is allocated, and outlives this.
  AdamW(const ParameterTable& table, const RowOwnership& ownership, const OptimizerConfig& config, Arena& arena);

  // Takes the table's values as the masters: after initialisation or loading of weights.
  void adopt_values(const Stream& stream);
  // Makes the masters the values of own rows: after the masters were filled.
  void publish_masters(const Stream& stream) const;

  // What this rank owns of a weight, in the order of RowOwnership::pieces(); a checkpoint's view. Elements in the flat
  // buffers, tensors f32 of their size.
  struct OwnState {
    WeightId weight;
    Range elements;
    Tensor master;  // the values themselves in fp32
    Tensor exp_avg;
    Tensor exp_avg_sq;
  };
  std::vector<OwnState> own_states() const;

  // Update `step` (from 1) with the synchronised gradients times gradient_scale; writes the new values of own rows.
  // Says after each bucket that its values are on their way, also where it owns none.
  void update(const Stream& stream, int64_t step, double lr, double gradient_scale,
              const std::function<void(size_t bucket)>& updated) const;

 private:
  struct Slice {
    Tensor value;     // working dtype, in the flat buffer
    Tensor gradient;  // f32
    Tensor master;    // f32; the value itself in fp32
    Tensor exp_avg;
    Tensor exp_avg_sq;
    bool decay;
  };

  const ParameterTable& table_;
  std::vector<RowOwnership::Piece> pieces_;  // bucket by bucket
  size_t buckets_;
  OptimizerConfig config_;
  std::vector<Slice> slices_;
};

}  // namespace invar
