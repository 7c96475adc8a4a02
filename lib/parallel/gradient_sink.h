#pragma once

#include <functional>

#include "ops/sample_sums.h"
#include "parallel/parameter.h"
#include "parallel/sum_context.h"

namespace invar {

// Told when the gradient of a weight is complete on this rank: GradientSync.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  // A layer has added its part of the weight's gradient of a micro-batch (Weight::users).
  virtual void gradient_done(WeightId id) = 0;
};

// Where layers leave the gradients of weights. A gradient goes from the layer to done(), from there to
// GradientListener::gradient_done(), and in the step's last micro-batch from GradientSync to ReplicaSums::sum().
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // Around a micro-batch with a backward pass. first_sample: where its samples are among this rank's of the step. What
  // the first takes from ctx.scratch is in use until the second. Both are collective over the tensor group.
  virtual void begin_micro_batch(const SumContext& ctx, int64_t first_sample) = 0;
  virtual void end_micro_batch(const SumContext& ctx) = 0;

  // Where a layer adds the gradient of a vector (Weight::vector), f32: (rows, width) of as many rows as it likes to sum
  // over in one of these shapes, or (width).
  virtual Tensor vector(WeightId id) = 0;
  // Adds the gradient of lookups of rows by the micro-batch's T tokens, by calls add(part, sums) for parts of them,
  // ascending, each of which adds those of its part (ops::embedding_backward).
  using AddLookups = std::function<void(Range tokens, const ops::SampleSums& sums)>;
  virtual void add_lookups(const SumContext& ctx, const WeightUse& use, const AddLookups& add) = 0;
  // Adds aᵀ · b, where a (T, the weight's rows) and b (T, columns) are of these T tokens; not of a vector, nor of a
  // weight with `lookups_only`. The tokens are whole samples, or lie within one, and all of a micro-batch come once,
  // ascending; else Error{kFault}. What it takes from ctx.scratch it gives back.
  virtual void add_product(const SumContext& ctx, const WeightUse& use, Range tokens, const Tensor& a,
                           const Tensor& b) = 0;
  // A layer has added this micro-batch's gradient: once per layer that uses the weight, so twice for tied embeddings.
  virtual void done(WeightId id) = 0;
};

// Error{kFault} if a and b are not of these tokens, or the weight takes no products.
void check_product(const Weight& weight, Range tokens, const Tensor& a, const Tensor& b);

}  // namespace invar
