#pragma once

#include <functional>

#include "parallel/vector_sums.h"
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
  // Where a layer adds a vector's gradient of the micro-batch: in any order that of the step, in fixed order the rows
  // of terms that it is a sum of (Weight::terms).
  virtual Tensor vector_gradient(WeightId id) = 0;
  // Adds the gradient of lookups of rows by these tokens, by calls add(part, sums) for parts of them, ascending, each
  // of which adds those of its part (ops::embedding_backward). In any order there is one part; in fixed order the
  // tokens are the whole micro-batch, else Error{kFault}, and parts are whole samples.
  using AddLookups = std::function<void(Range tokens, const ops::SampleSums& sums)>;
  virtual void accumulate_lookups(const Stream& stream, const WeightUse& use, Range tokens, const AddLookups& add) = 0;
  // Adds aᵀ · b, where a (T, the weight's rows) and b (T, columns) are of these T tokens; of a weight without `terms`
  // or `lookups_only`. In fixed order the tokens are whole samples, or lie within one, and all of a micro-batch come
  // once, ascending; a sample's product is then rounded to f32 before it is added. What it takes from `scratch` it
  // gives back. Error{kFault} for other tokens.
  virtual void accumulate_product(const Stream& stream, Arena& scratch, const WeightUse& use, Range tokens,
                                  const Tensor& a, const Tensor& b) = 0;
  // A layer has added this micro-batch's gradient: once per layer that uses the weight, so twice for tied embeddings.
  virtual void gradient_done(WeightId id) = 0;
};

// How products are made in fixed order. They have the same bits whatever these are; measured by tools/bench_cuda.
struct ProductLimits {
  // A weight's gradient of so many elements is few tiles for a GPU's multiprocessors, four rounds or less, so that the
  // products of several samples are made in one call; a larger one is added to in place.
  int64_t few_elements = int64_t{1} << 24;
  // Of products that wait to be added, or of what one is proved to be added to: rows of a weight, whole runs of
  // tile_rows and at least one such run, are taken at a time.
  int64_t bytes = 256 << 20;
  int64_t tile_rows = 256;
};

class ResidentWeights : public WeightProvider {
 public:
  explicit ResidentWeights(const ParameterTable& table, const ProductLimits& limits = {})
      : table_(table), limits_(limits), vector_sums_(table) {}
  // Who makes the values ready when they are acquired, and is told of each gradient_done: of a weight with `terms` when
  // the micro-batch ends.
  struct Listener {
    std::function<void(WeightId)> acquired;
    std::function<void(WeightId)> gradient_done;
  };
  void listen(Listener listener) { listener_ = std::move(listener); }
  // In fixed order, where a micro-batch's samples are among this rank's of the step.
  struct Samples {
    const WorkerOrder& order;
    int64_t first = 0;
    int64_t sequence_length = 0;
  };
  // Around a micro-batch with a backward pass in fixed order: the region's tokens. What the first takes from `scratch`
  // is in use until the second, which is collective over the region's group: what VectorSums takes, and spares as large
  // as the largest weight with products, for sums of them that no micro-batch leaves (WorkerOrder::kept). They serve
  // one weight after another: if its products come in several calls, a sum that one leaves in a spare is finished
  // before other products are added, else Error{kFault}.
  void begin_micro_batch(const Stream& stream, const TensorRegion& region, Arena& scratch, const Samples& samples);
  void end_micro_batch(const Stream& stream);

  Tensor acquire_forward(WeightId id) override { return acquire(id); }
  Tensor acquire_backward(WeightId id) override { return acquire(id); }
  const LeafCut* leaves(WeightId id) const override { return table_.weight(id).leaves.get(); }
  Tensor vector_gradient(WeightId id) override;
  void accumulate_lookups(const Stream& stream, const WeightUse& use, Range tokens, const AddLookups& add) override;
  void accumulate_product(const Stream& stream, Arena& scratch, const WeightUse& use, Range tokens, const Tensor& a,
                          const Tensor& b) override;
  void gradient_done(WeightId id) override;

 private:
  template <class F>
  void for_rows(const Tensor& gradient, int64_t copies, const F& f) const;
  void add_products(const Stream& stream, const WeightUse& use, const ops::SampleSums& sums, const Tensor& a,
                    const Tensor& b);
  std::vector<WorkerOrder::Place> places_of(Range tokens, LeafKind of_whole) const;
  std::vector<Tensor> kept_buffers(const WeightUse& use) const;
  std::vector<Tensor> all_buffers(const WeightUse& use) const;
  void use_spares(const WeightUse& use, const WorkerOrder::Place& last);
  bool by_terms(WeightId id) const { return samples_ && table_.weight(id).terms; }
  Tensor acquire(WeightId id) const {
    if (listener_.acquired) listener_.acquired(id);
    return table_.weight(id).value;
  }

  const ParameterTable& table_;
  ProductLimits limits_;
  Listener listener_;
  std::optional<Samples> samples_;  // null: any order
  std::vector<Tensor> spares_;      // buffers above the table's
  std::optional<WeightUse> spares_of_;
  VectorSums vector_sums_;
  std::vector<WeightId> held_back_;  // done, but for their sums
};

}  // namespace invar
