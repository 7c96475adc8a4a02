#include "parallel/worker_order.h"

#include <algorithm>

#include "config/contract.h"
#include "core/error.h"

namespace invar {
namespace {

[[noreturn]] void refuse_cut(int64_t workers, int64_t batch, size_t ranks) {
  throw Error(
      ErrorKind::kConfig,
      format("{} samples over {} data-parallel ranks do not part where those of {} workers do", batch, ranks, workers),
      "choose numerics.workers as a multiple of the ranks and a divisor of train.global_batch_size");
}

std::vector<Range> deal_workers(int64_t workers, int64_t batch, std::span<const Range> samples) {
  INVAR_CHECK(1 <= workers && workers <= batch, "{} workers for {} samples", workers, batch);
  std::vector<Range> runs;
  for (const Range& own : samples) {
    const Range run = workers_within(own, workers, batch);
    if (first_sample(run.begin, workers, batch) != own.begin || first_sample(run.end, workers, batch) != own.end) {
      refuse_cut(workers, batch, samples.size());
    }
    runs.push_back(run);
  }
  return runs;
}

std::vector<WorkerOrder::Place> places_of(const LeafProgram& program, int64_t workers, int64_t batch,
                                          LeafKind gradient) {
  std::vector<WorkerOrder::Place> places;
  for (const LeafProgram::Step& step : program.steps) {
    const int64_t own = first_sample(step.leaf + 1, workers, batch) - first_sample(step.leaf, workers, batch);
    const int at_once = gradient == LeafKind::kAddable && own == 1 && step.joins > 0 ? 1 : 0;
    const int buffer = step.buffer - at_once;
    for (int64_t sample = 0; sample < own; ++sample) {
      const bool clears = at_once == 0 && sample == 0 && buffer > 0;
      places.push_back({buffer, clears, sample + 1 == own ? step.joins - at_once : 0});
    }
  }
  return places;
}

LeafProgram program_of(int64_t workers, int64_t batch, Range samples) {
  return leaf_program(workers, workers_within(samples, workers, batch), LeafKind::kOwnBuffer);
}

// What is left after each micro-batch.
int kept_of(std::span<const WorkerOrder::Place> places, int64_t micro_batch) {
  INVAR_CHECK(!places.empty() && micro_batch > 0, "{} samples in micro-batches of {}", places.size(), micro_batch);
  int kept = 0;
  for (int64_t end = micro_batch;; end += micro_batch) {
    const auto& last = places[static_cast<size_t>(std::min(end, std::ssize(places)) - 1)];
    kept = std::max(kept, last.buffer - last.joins + 1);
    if (end >= std::ssize(places)) return kept;
  }
}

}  // namespace

SumCounts count_sums(int64_t workers, int64_t batch, Range samples, int64_t micro_batch) {
  const LeafProgram program = program_of(workers, batch, samples);
  return {kept_of(places_of(program, workers, batch, LeafKind::kOwnBuffer), micro_batch), program.buffers};
}

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, std::span<const Range> samples, int data_rank,
                         int64_t micro_batch)
    : plan_(workers, deal_workers(workers, batch, samples)),
      program_(program_of(workers, batch, samples[static_cast<size_t>(data_rank)])),
      own_buffer_(places_of(program_, workers, batch, LeafKind::kOwnBuffer)),
      addable_(places_of(program_, workers, batch, LeafKind::kAddable)),
      kept_(kept_of(own_buffer_, micro_batch)) {}

}  // namespace invar
