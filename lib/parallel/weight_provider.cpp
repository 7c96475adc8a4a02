#include "parallel/weight_provider.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

// Measured by tools/bench_cuda. A weight's gradient of so many elements is few tiles for a GPU's multiprocessors, four
// rounds or less, so that the products of several samples are one product; a larger one is added to in place.
constexpr int64_t kFewTiles = int64_t{1} << 24;
// Of products that wait to be added, or of what one is proved to be added to.
constexpr int64_t kTermBytes = 256 << 20;
constexpr int64_t kTileRows = 256;

// The products of a weight's gradient: columns of a are its rows.
struct Products {
  const Stream& stream;
  std::span<const WorkerOrder::Place> places;  // of the samples
  const Tensor& a;
  const Tensor& b;

  void add_in_place(Range columns, std::span<const Tensor> buffers) const {
    const int64_t tokens = a.dim(0) / std::ssize(places);
    for (int64_t first = 0; const WorkerOrder::Place& place : places) {
      const Tensor& into = buffers[static_cast<size_t>(place.buffer)];
      if (place.clears) ops::zero(stream, into);
      ops::matmul_columns(stream, a.rows(first, first + tokens), columns, ops::Transpose::kYes,
                          b.rows(first, first + tokens), into, 1.0f);
      join_buffers(stream, buffers, place.buffer, place.joins);
      first += tokens;
    }
  }
  void add_at_once(Range columns, std::span<const Tensor> buffers, Arena& scratch) const {
    const ArenaScope scope(scratch);
    const Tensor terms =
        scratch.allocate("gradients of samples", DType::kF32, {std::ssize(places), columns.size(), b.dim(1)});
    ops::matmul_samples(stream, a, columns, b, terms);
    ops::add_terms(stream, terms, places, buffers);
  }
};

}  // namespace

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

std::vector<WorkerOrder::Place> ResidentWeights::places_of(Range tokens) const {
  const int64_t length = samples_->sequence_length;
  const Range samples{tokens.begin / length, ceil_div(tokens.end, length)};
  const bool begins = tokens.begin % length == 0, ends = tokens.end % length == 0;
  const bool whole = begins && ends;
  INVAR_CHECK(whole || samples.size() == 1, "tokens {} to {} of samples of {}", tokens.begin, tokens.end, length);
  const auto of = samples_->order.of({samples_->first + samples.begin, samples_->first + samples.end},
                                     whole ? LeafKind::kAddable : LeafKind::kOwnBuffer);
  std::vector<WorkerOrder::Place> places(of.begin(), of.end());
  places.front().clears = places.front().clears && begins;
  if (!ends) places.back().joins = 0;
  return places;
}

void ResidentWeights::accumulate_product(const Stream& stream, Arena& scratch, const WeightUse& use, Range tokens,
                                         const Tensor& a, const Tensor& b) {
  if (!samples_) {
    return ops::matmul(stream, a, ops::Transpose::kYes, b, ops::Transpose::kNo, table_.weight(use.id).gradient, 1.0f);
  }
  const std::vector<WorkerOrder::Place> places = places_of(tokens);
  const Products products{stream, places, a, b};
  std::vector<Tensor> gradients;
  for (int buffer = 0; buffer < table_.gradient_buffers(); ++buffer) gradients.push_back(table_.gradient(use, buffer));
  const Tensor& gradient = gradients.front();
  const bool at_once = places.size() > 1 && gradient.numel() <= kFewTiles;
  const int64_t bytes = gradient.bytes() * (at_once ? std::ssize(places) : 1);
  const int64_t parts = std::max<int64_t>(1, ceil_div(bytes, kTermBytes));
  const int64_t rows = gradient.dim(0), step = round_up(ceil_div(rows, parts), kTileRows);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const Range part{begin, std::min(begin + step, rows)};
    std::vector<Tensor> buffers;
    for (const Tensor& whole : gradients) buffers.push_back(whole.rows(part.begin, part.end));
    at_once ? products.add_at_once(part, buffers, scratch) : products.add_in_place(part, buffers);
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
