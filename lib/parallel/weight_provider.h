#pragma once

#include <functional>

#include "parallel/parameter.h"
#include "parallel/worker_order.h"

namespace invar {

// Where layers get weights and leave gradients. Resident weights are pointers; generalised tensor parallelism will
// gather them just in time behind the same calls.
class WeightProvider {
 public:
  virtual ~WeightProvider() = default;
  virtual Tensor acquire_forward(WeightId id) = 0;
  virtual Tensor acquire_backward(WeightId id) = 0;
  // How sums over the weight's rows are evaluated; null: in any order.
  virtual const LeafCut* leaves(WeightId id) const = 0;
  // Adds the gradient of these tokens of the micro-batch, by calls add(part, into) for parts of them, ascending, each
  // of which adds the gradient of its part to `into`, f32 of the weight's shape. In any order there is one part; in
  // fixed order a part lies within a sample.
  using AddGradient = std::function<void(Range tokens, const Tensor& into)>;
  virtual void accumulate(const Stream& stream, const WeightUse& use, Range tokens, const AddGradient& add) = 0;
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
  // Before backward passes in fixed order: where the next micro-batch's samples are among this rank's of the step.
  void begin_micro_batch(const WorkerOrder& order, int64_t first_sample, int64_t sequence_length);

  Tensor acquire_forward(WeightId id) override { return acquire(id); }
  Tensor acquire_backward(WeightId id) override { return acquire(id); }
  const LeafCut* leaves(WeightId id) const override { return table_.weight(id).leaves.get(); }
  void accumulate(const Stream& stream, const WeightUse& use, Range tokens, const AddGradient& add) override;
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
  const WorkerOrder* order_ = nullptr;  // null: any
  int64_t first_sample_ = 0;
  int64_t sequence_length_ = 0;
};

}  // namespace invar
