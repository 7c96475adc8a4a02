#include "parallel/weight_provider.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
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

void ResidentWeights::accumulate(const Stream& stream, const WeightUse& use, Range tokens, const AddGradient& add) {
  if (!samples_) return add(tokens, table_.weight(use.id).gradient);
  if (by_terms(use.id)) return add(tokens, vector_sums_.terms(use.id));
  add_by_samples(stream, use, tokens, LeafKind::kOwnBuffer, add);
}

void ResidentWeights::add_by_samples(const Stream& stream, const WeightUse& use, Range tokens, LeafKind of_whole,
                                     const AddGradient& add) {
  const std::vector<Tensor> buffers = buffers_of(use);
  const int64_t length = samples_->sequence_length;
  for (int64_t sample = tokens.begin / length; sample * length < tokens.end; ++sample) {
    const Range part = intersect(tokens, {sample * length, (sample + 1) * length});
    const WorkerOrder::Place place = places_of(part, of_whole).front();
    const Tensor& into = buffers[static_cast<size_t>(place.buffer)];
    if (place.clears) ops::zero(stream, into);
    add(part, into);
    join_buffers(stream, buffers, place.buffer, place.joins);
  }
}

// Of whole samples, or of a part of one, which clears if it begins with the sample and joins if it ends with it.
std::vector<WorkerOrder::Place> ResidentWeights::places_of(Range tokens, LeafKind of_whole) const {
  const int64_t length = samples_->sequence_length;
  const Range samples{tokens.begin / length, ceil_div(tokens.end, length)};
  const bool begins = tokens.begin % length == 0, ends = tokens.end % length == 0;
  const bool whole = begins && ends;
  INVAR_CHECK(!tokens.empty() && (whole || samples.size() == 1), "tokens {} to {} of samples of {}", tokens.begin,
              tokens.end, length);
  const auto of = samples_->order.of({samples_->first + samples.begin, samples_->first + samples.end},
                                     whole ? of_whole : LeafKind::kOwnBuffer);
  std::vector<WorkerOrder::Place> places(of.begin(), of.end());
  places.front().clears = places.front().clears && begins;
  if (!ends) places.back().joins = 0;
  return places;
}

std::vector<Tensor> ResidentWeights::buffers_of(const WeightUse& use) const {
  std::vector<Tensor> buffers;
  for (int buffer = 0; buffer < table_.gradient_buffers(); ++buffer) buffers.push_back(table_.gradient(use, buffer));
  return buffers;
}

// f(rows) for all of a gradient, of which `copies` copies of these rows are as large as the limit says.
template <class F>
void ResidentWeights::for_rows(const Tensor& gradient, int64_t copies, const F& f) const {
  const int64_t rows = gradient.dim(0);
  const int64_t tile_bytes = gradient.dim(1) * size_of(gradient.dtype()) * copies * limits_.tile_rows;
  const int64_t step = std::max<int64_t>(limits_.bytes / std::max<int64_t>(tile_bytes, 1), 1) * limits_.tile_rows;
  for (int64_t begin = 0; begin < rows; begin += step) f(Range{begin, std::min(begin + step, rows)});
}

void ResidentWeights::accumulate_product(const Stream& stream, Arena& scratch, const WeightUse& use, Range tokens,
                                         const Tensor& a, const Tensor& b) {
  INVAR_CHECK(a.dim(0) == tokens.size() && b.dim(0) == tokens.size() && !by_terms(use.id),
              "'{}': a product of {} and {} for {} tokens", table_.weight(use.id).name, a.describe(), b.describe(),
              tokens.size());
  if (!samples_) {
    return ops::matmul(stream, a, ops::Transpose::kYes, b, ops::Transpose::kNo, table_.weight(use.id).gradient, 1.0f);
  }
  const std::vector<WorkerOrder::Place> places = places_of(tokens, LeafKind::kAddable);
  const std::vector<Tensor> gradients = buffers_of(use);
  if (places.size() > 1 && gradients.front().numel() <= limits_.few_elements) {
    return for_rows(gradients.front(), std::ssize(places), [&](Range rows) {
      const ArenaScope scope(scratch);
      const Tensor terms =
          scratch.allocate("gradients of samples", DType::kF32, {std::ssize(places), rows.size(), b.dim(1)});
      ops::matmul_samples(stream, a, rows, b, terms);
      std::vector<Tensor> buffers;
      for (const Tensor& whole : gradients) buffers.push_back(whole.rows(rows.begin, rows.end));
      ops::add_terms(stream, terms, places, buffers);
    });
  }
  add_by_samples(stream, use, tokens, LeafKind::kAddable, [&](Range part, const Tensor& into) {
    const Range local{part.begin - tokens.begin, part.end - tokens.begin};
    for_rows(into, 1, [&](Range rows) {
      ops::matmul_columns(stream, a.rows(local.begin, local.end), rows, ops::Transpose::kYes,
                          b.rows(local.begin, local.end), into.rows(rows.begin, rows.end), 1.0f);
    });
  });
}

void ResidentWeights::gradient_done(WeightId id) {
  if (by_terms(id)) {
    held_back_.push_back(id);
  } else if (listener_.gradient_done) {
    listener_.gradient_done(id);
  }
}

}  // namespace invar
