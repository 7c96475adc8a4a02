#include "parallel/weight_provider.h"

#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"

namespace invar {

void ResidentWeights::begin_micro_batch(const Stream& stream, const TensorRegion& region, Arena& scratch,
                                        const Samples& samples) {
  samples_.emplace(samples);
  held_back_.clear();
  vector_sums_.begin(stream, region, scratch, samples.sequence_length);
}

void ResidentWeights::end_micro_batch(const Stream& stream) {
  const int64_t samples = vector_sums_.samples();
  vector_sums_.finish(stream, samples_->order.of({samples_->first, samples_->first + samples}, LeafKind::kAddable));
  for (const WeightId id : held_back_) {
    if (listener_.gradient_done) listener_.gradient_done(id);
  }
  held_back_.clear();
}

void ResidentWeights::accumulate(const Stream& stream, const WeightUse& use, Range tokens, LeafKind gradient,
                                 const AddGradient& add) {
  if (!samples_) return add(tokens, table_.weight(use.id).gradient);
  if (by_terms(use.id)) return add(tokens, vector_sums_.terms(use.id));
  const int64_t length = samples_->sequence_length;
  for (int64_t sample = tokens.begin / length; sample * length < tokens.end; ++sample) {
    const Range whole{sample * length, (sample + 1) * length};
    const Range part = intersect(tokens, whole);
    const WorkerOrder::Place& place = samples_->order.of(samples_->first + sample, gradient);
    const Tensor into = table_.gradient(use, place.buffer);
    if (place.clears && part.begin == whole.begin) ops::zero(stream, into);
    add(part, into);
    if (place.joins == 0 || part.end < whole.end) continue;
    std::vector<Tensor> buffers;
    for (int buffer = 0; buffer <= place.buffer; ++buffer) buffers.push_back(table_.gradient(use, buffer));
    join_buffers(stream, buffers, place.buffer, place.joins);
  }
}

void ResidentWeights::gradient_done(WeightId id) {
  if (by_terms(id)) {
    held_back_.push_back(id);
  } else if (listener_.gradient_done) {
    listener_.gradient_done(id);
  }
}

}  // namespace invar
