#include "parallel/weight_provider.h"

#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"

namespace invar {

void ResidentWeights::begin_micro_batch(const WorkerOrder& order, int64_t first_sample, int64_t sequence_length) {
  order_ = &order;
  first_sample_ = first_sample;
  sequence_length_ = sequence_length;
}

void ResidentWeights::accumulate(const Stream& stream, const WeightUse& use, Range tokens, const AddGradient& add) {
  if (order_ == nullptr) return add(tokens, table_.weight(use.id).gradient);
  for (int64_t sample = tokens.begin / sequence_length_; sample * sequence_length_ < tokens.end; ++sample) {
    const Range whole{sample * sequence_length_, (sample + 1) * sequence_length_};
    const Range part = intersect(tokens, whole);
    const WorkerOrder::Place& place = order_->of(first_sample_ + sample);
    const Tensor into = table_.gradient(use, place.buffer);
    if (place.begins && part.begin == whole.begin) ops::zero(stream, into);
    add(part, into);
    if (place.joins == 0 || part.end < whole.end) continue;
    std::vector<Tensor> buffers;
    for (int buffer = 0; buffer <= place.buffer; ++buffer) buffers.push_back(table_.gradient(use, buffer));
    join_buffers(stream, buffers, place.buffer, place.joins);
  }
}

}  // namespace invar
