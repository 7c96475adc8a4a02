#include "parallel/invariant_gradients.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/term_sums.h"
#include "ops/tree_sum.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

// Samples whose lookups one operation adds. It changes only the rows that they look up; where a sum of an earlier
// micro-batch joins another, all rows do, so that there it ends and buffers are joined.
struct LookupRun {
  std::vector<WorkerOrder::Place> places;
  Range begun;  // buffers of sums that begin in the run and are left
  int top = 0;  // then this one is joined to the one below, and so on
  int joins = 0;
};

std::vector<LookupRun> lookup_runs(std::span<const WorkerOrder::Place> places) {
  std::vector<LookupRun> runs;
  int lowest = ops::SumProgram::kMaxDepth;  // of the buffers whose sums began here; those below have earlier ones
  for (const WorkerOrder::Place& place : places) {
    if (runs.empty() || runs.back().joins > 0) runs.emplace_back();
    LookupRun& run = runs.back();
    if (place.clears) lowest = std::min(lowest, place.buffer);
    const int joins = std::clamp(place.buffer - lowest + 1, 0, place.joins);
    run.places.push_back({place.buffer, place.clears, joins});
    run.top = place.buffer - joins;
    run.joins = place.joins - joins;
    run.begun = {std::min(lowest, run.top + 1), run.top + 1};
  }
  return runs;
}

}  // namespace

void InvariantGradients::begin_micro_batch(const SumContext& ctx, int64_t first_sample) {
  INVAR_CHECK(table_.gradient_buffers() >= order_.kept(), "{} gradient buffers of {}", table_.gradient_buffers(),
              order_.kept());
  first_sample_ = first_sample;
  held_back_.clear();
  spares_.clear();
  spares_of_.reset();
  int64_t largest = 0;
  for (const Weight& weight : table_.weights()) {
    if (!weight.lookups_only) largest = std::max(largest, weight.elements().size());
  }
  for (int buffer = table_.gradient_buffers(); buffer < order_.sums(); ++buffer) {
    spares_.push_back(ctx.scratch.allocate("sum of samples", DType::kF32, {largest}));
  }
  vector_sums_.begin(ctx);
}

void InvariantGradients::end_micro_batch(const SumContext& ctx) {
  INVAR_CHECK(!spares_of_, "a sum of '{}' is unfinished", table_.weight(spares_of_->id).name);
  spares_.clear();
  const int64_t samples = vector_sums_.samples();
  vector_sums_.finish(ctx.stream, order_.of({first_sample_, first_sample_ + samples}, LeafKind::kAddable));
  for (const WeightId id : held_back_) listener_.gradient_done(id);
  held_back_.clear();
}

void InvariantGradients::add_lookups(const SumContext& ctx, const WeightUse& use, const AddLookups& add) {
  const std::vector<Tensor> buffers = kept_buffers(use);
  Range part{0, 0};
  for (LookupRun& run : lookup_runs(places_of(ctx, {0, ctx.region.tokens()}, LeafKind::kOwnBuffer))) {
    part = {part.end, part.end + std::ssize(run.places) * ctx.sequence_length};
    for (int64_t buffer = run.begun.begin; buffer < run.begun.end; ++buffer) {
      ops::zero(ctx.stream, buffers.at(static_cast<size_t>(buffer)));
    }
    add(part, {std::move(run.places), buffers});
    join_buffers(ctx.stream, buffers, run.top, run.joins);
  }
}

// Of whole samples, or of a part of one, which clears if it begins with the sample and joins if it ends with it.
std::vector<WorkerOrder::Place> InvariantGradients::places_of(const SumContext& ctx, Range tokens,
                                                              LeafKind of_whole) const {
  const int64_t length = ctx.sequence_length;
  const Range samples{tokens.begin / length, ceil_div(tokens.end, length)};
  const bool begins = tokens.begin % length == 0, ends = tokens.end % length == 0;
  const bool whole = begins && ends;
  INVAR_CHECK(!tokens.empty() && (whole || samples.size() == 1), "tokens {} to {} of samples of {}", tokens.begin,
              tokens.end, length);
  const auto of =
      order_.of({first_sample_ + samples.begin, first_sample_ + samples.end}, whole ? of_whole : LeafKind::kOwnBuffer);
  std::vector<WorkerOrder::Place> places(of.begin(), of.end());
  places.front().clears = places.front().clears && begins;
  if (!ends) places.back().joins = 0;
  return places;
}

std::vector<Tensor> InvariantGradients::kept_buffers(const WeightUse& use) const {
  std::vector<Tensor> buffers;
  for (int buffer = 0; buffer < table_.gradient_buffers(); ++buffer) buffers.push_back(table_.gradient(use, buffer));
  return buffers;
}

std::vector<Tensor> InvariantGradients::all_buffers(const WeightUse& use) const {
  std::vector<Tensor> buffers = kept_buffers(use);
  const int64_t elements = table_.weight(use.id).elements().size();
  for (const Tensor& spare : spares_) buffers.push_back(table_.shaped(use.id, spare.rows(0, elements)));
  return buffers;
}

// last: of the samples that are added now.
void InvariantGradients::use_spares(const WeightUse& use, const WorkerOrder::Place& last) {
  INVAR_CHECK(!spares_of_ || *spares_of_ == use, "'{}' is added to while a sum of '{}' is unfinished",
              table_.weight(use.id).name, table_.weight(spares_of_->id).name);
  const bool unfinished = last.buffer - last.joins >= table_.gradient_buffers();
  spares_of_ = unfinished ? std::optional(use) : std::nullopt;
}

// f(rows) for all of a gradient, of which `copies` copies of these rows are as large as the limit says.
template <class F>
void InvariantGradients::for_rows(const Tensor& gradient, int64_t copies, const F& f) const {
  const int64_t rows = gradient.dim(0);
  const int64_t tile_bytes = gradient.dim(1) * size_of(gradient.dtype()) * copies * limits_.tile_rows;
  const int64_t step = std::max<int64_t>(limits_.bytes / std::max<int64_t>(tile_bytes, 1), 1) * limits_.tile_rows;
  for (int64_t begin = 0; begin < rows; begin += step) f(Range{begin, std::min(begin + step, rows)});
}

void InvariantGradients::add_product(const SumContext& ctx, const WeightUse& use, Range tokens, const Tensor& a,
                                     const Tensor& b) {
  check_product(table_.weight(use.id), tokens, a, b);
  const ops::SampleSums sums(places_of(ctx, tokens, LeafKind::kAddable), all_buffers(use));
  const int64_t samples = std::ssize(sums.places);
  const Tensor& gradient = sums.buffers.front();
  if (samples == 1 || gradient.numel() > limits_.few_elements) return add_products(ctx.stream, use, sums, a, b);
  use_spares(use, sums.places.back());
  for_rows(gradient, samples, [&](Range rows) {
    const ArenaScope scope(ctx.scratch);
    const Tensor terms = ctx.scratch.allocate("gradients of samples", DType::kF32, {samples, rows.size(), b.dim(1)});
    ops::matmul_samples(ctx.stream, a, rows, b, terms, numerics_);
    std::vector<Tensor> buffers;
    for (const Tensor& whole : sums.buffers) buffers.push_back(whole.rows(rows.begin, rows.end));
    ops::add_terms(ctx.stream, terms, {sums.places, std::move(buffers)});
  });
}

// In place, one sample after another.
void InvariantGradients::add_products(const Stream& stream, const WeightUse& use, const ops::SampleSums& sums,
                                      const Tensor& a, const Tensor& b) {
  const int64_t length = a.dim(0) / std::ssize(sums.places);
  Range part{0, 0};
  for (const WorkerOrder::Place& place : sums.places) {
    part = {part.end, part.end + length};
    use_spares(use, place);
    const Tensor& into = sums.buffers[static_cast<size_t>(place.buffer)];
    if (place.clears) ops::zero(stream, into);
    for_rows(into, 1, [&](Range rows) {
      ops::matmul_columns(stream, a.rows(part.begin, part.end), rows, ops::Transpose::kYes,
                          b.rows(part.begin, part.end), into.rows(rows.begin, rows.end), 1.0f, numerics_);
    });
    join_buffers(stream, sums.buffers, place.buffer, place.joins);
  }
}

// Of a vector when the micro-batch ends.
void InvariantGradients::done(WeightId id) {
  if (table_.weight(id).vector) {
    held_back_.push_back(id);
  } else {
    listener_.gradient_done(id);
  }
}

}  // namespace invar
