#include "parallel/worker_order.h"

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

}  // namespace

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, std::span<const Range> samples, int data_rank)
    : plan_(workers, deal_workers(workers, batch, samples)),
      program_(leaf_program(workers, workers_within(samples[static_cast<size_t>(data_rank)], workers, batch),
                            LeafKind::kOwnBuffer)),
      own_buffer_(places_of(program_, workers, batch, LeafKind::kOwnBuffer)),
      addable_(places_of(program_, workers, batch, LeafKind::kAddable)) {}

}  // namespace invar
