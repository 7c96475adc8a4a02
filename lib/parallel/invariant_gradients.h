#pragma once

#include <optional>

#include "ops/numerics.h"
#include "parallel/gradient_sink.h"
#include "parallel/vector_sums.h"
#include "parallel/worker_order.h"

namespace invar {

// How products are made in invariant numerics. They have the same bits whatever these are; measured by
// tools/bench_cuda.
struct ProductLimits {
  // A weight's gradient of so many elements is few tiles for a GPU's multiprocessors, four rounds or less, so that the
  // products of several samples are made in one call; a larger one is added to in place.
  int64_t few_elements = int64_t{1} << 24;
  // Of products that wait to be added, or of what one is proved to be added to: rows of a weight, whole runs of
  // tile_rows and at least one such run, are taken at a time.
  int64_t bytes = 256 << 20;
  int64_t tile_rows = 256;
};

// The gradients of a step in an order that depends neither on the layout nor on micro-batches: samples one after
// another as WorkerOrder says, vectors by VectorSums, each sample's product rounded to f32 before it is added.
//
// During a micro-batch it holds, on the scratch of begin_micro_batch(), what VectorSums takes, and spare buffers as
// large as the largest weight with products, for sums that no micro-batch leaves (WorkerOrder::kept). They serve one
// weight after another: if its products come in several calls, a sum that one leaves in a spare is finished before
// other products are added, else Error{kFault}.
class InvariantGradients : public GradientSink {
 public:
  // All but limits outlive this.
  InvariantGradients(const ParameterTable& table, const WorkerOrder& order, const ops::Numerics& numerics,
                     GradientListener& listener, const ProductLimits& limits = {})
      : table_(table), order_(order), numerics_(numerics), listener_(listener), limits_(limits), vector_sums_(table) {}

  void begin_micro_batch(const SumContext& ctx, int64_t first_sample) override;
  void end_micro_batch(const SumContext& ctx) override;
  Tensor vector(WeightId id) override { return vector_sums_.terms(id); }
  void add_lookups(const SumContext& ctx, const WeightUse& use, const AddLookups& add) override;
  void add_product(const SumContext& ctx, const WeightUse& use, Range tokens, const Tensor& a,
                   const Tensor& b) override;
  void done(WeightId id) override;

 private:
  template <class F>
  void for_rows(const Tensor& gradient, int64_t copies, const F& f) const;
  void add_products(const Stream& stream, const WeightUse& use, const ops::SampleSums& sums, const Tensor& a,
                    const Tensor& b);
  std::vector<WorkerOrder::Place> places_of(const SumContext& ctx, Range tokens, LeafKind of_whole) const;
  std::vector<Tensor> kept_buffers(const WeightUse& use) const;
  std::vector<Tensor> all_buffers(const WeightUse& use) const;
  void use_spares(const WeightUse& use, const WorkerOrder::Place& last);

  const ParameterTable& table_;
  const WorkerOrder& order_;
  const ops::Numerics& numerics_;
  GradientListener& listener_;
  ProductLimits limits_;
  VectorSums vector_sums_;

  // Of the micro-batch under way.
  int64_t first_sample_ = 0;
  std::vector<Tensor> spares_;  // buffers above the table's
  std::optional<WeightUse> spares_of_;
  std::vector<WeightId> held_back_;  // done, but for their sums
};

}  // namespace invar
