#pragma once

#include "parallel/parameter.h"

namespace invar {

// Where layers get weights and leave gradients. Resident weights are pointers; generalised tensor parallelism will
// gather them just in time behind the same four calls.
class WeightProvider {
 public:
  virtual ~WeightProvider() = default;
  virtual Tensor acquire_forward(WeightId id) = 0;
  virtual Tensor acquire_backward(WeightId id) = 0;
  // f32; the caller adds into it.
  virtual Tensor gradient(WeightId id) = 0;
  // A layer has added this micro-batch's gradient: once per layer that uses the weight, so twice for tied embeddings.
  virtual void gradient_done(WeightId id) = 0;
};

class ResidentWeights : public WeightProvider {
 public:
  explicit ResidentWeights(const ParameterTable& table) : table_(table) {}
  // Who makes the values ready when they are acquired, and is told of each gradient_done.
  struct Listener {
    std::function<void(WeightId)> acquired;
    std::function<void(WeightId)> gradient_done;
  };
  void listen(Listener listener) { listener_ = std::move(listener); }
  Tensor acquire_forward(WeightId id) override { return acquire(id); }
  Tensor acquire_backward(WeightId id) override { return acquire(id); }
  Tensor gradient(WeightId id) override { return table_.weight(id).gradient; }
  void gradient_done(WeightId id) override {
    if (listener_.gradient_done) listener_.gradient_done(id);
  }

 private:
  Tensor acquire(WeightId id) const {
    if (listener_.acquired) listener_.acquired(id);
    return table_.weight(id).value;
  }

  const ParameterTable& table_;
  Listener listener_;
};

}  // namespace invar
