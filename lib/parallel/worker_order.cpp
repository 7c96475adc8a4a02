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

}  // namespace

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, std::span<const Range> samples, int data_rank)
    : plan_(workers, deal_workers(workers, batch, samples)),
      program_(leaf_program(workers, workers_within(samples[static_cast<size_t>(data_rank)], workers, batch),
                            LeafKind::kOwnBuffer)) {
  int used = 0;  // buffers
  for (const LeafProgram::Step& step : program_.steps) {
    const int64_t own = first_sample(step.leaf + 1, workers, batch) - first_sample(step.leaf, workers, batch);
    for (int64_t sample = 0; sample < own; ++sample) {
      places_.push_back({step.buffer, sample == 0 && step.buffer < used, sample + 1 == own ? step.joins : 0});
    }
    used = std::max(used, step.buffer + 1);
  }
}

}  // namespace invar
