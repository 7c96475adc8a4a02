#pragma once

#include <memory>
#include <vector>

#include "parallel/weight_store.h"

namespace invar {

// A store whose uses of a weight see a copy of its values, filled with NaN when the last of them ends: whoever reads a
// weight outside its handle computes NaN. For tests of layers and of other stores; it doubles the memory of the
// weights.
class PoisonedWeights : public WeightStore {
 public:
  // source: null if values never come from elsewhere. All outlive this.
  PoisonedWeights(const ParameterTable& table, ValueSource* source, const Stream& stream);

  HeldWeight use(WeightId id, Pass pass) override;

 private:
  void release(WeightId id) override;
  void poison(const Tensor& copy) const;

  const ParameterTable& table_;
  ValueSource* source_;
  const Stream& stream_;
  std::vector<int> uses_;  // under way, by weight
  Arena memory_;
  Tensor nan_;
  std::vector<Tensor> copies_;  // by weight
};

// As TrainState takes it.
std::unique_ptr<WeightStore> poisoned_weights(const ParameterTable& table, ValueSource& source, const Stream& stream);

}  // namespace invar
