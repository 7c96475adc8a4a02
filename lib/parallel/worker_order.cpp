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

std::vector<Range> equal_parts(int64_t workers, int64_t batch, int data_size) {
  if (batch % data_size != 0) refuse_cut(workers, batch, static_cast<size_t>(data_size));
  std::vector<Range> parts;
  for (int64_t rank = 0; rank < data_size; ++rank) {
    parts.push_back({first_sample(rank, data_size, batch), first_sample(rank + 1, data_size, batch)});
  }
  return parts;
}

}  // namespace

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, int data_size, int data_rank)
    : WorkerOrder(workers, batch, equal_parts(workers, batch, data_size), data_rank) {}

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, std::span<const Range> samples, int data_rank)
    : WorkerOrder(workers, batch, Dealt{deal_workers(workers, batch, samples)}, data_rank) {}

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, const Dealt& workers_of_ranks, int data_rank)
    : plan_(workers, workers_of_ranks.runs),
      program_(leaf_program(workers, workers_of_ranks.runs[static_cast<size_t>(data_rank)], LeafKind::kOwnBuffer)) {
  for (const LeafProgram::Step& step : program_.steps) {
    const int64_t samples = first_sample(step.leaf + 1, workers, batch) - first_sample(step.leaf, workers, batch);
    for (int64_t sample = 0; sample < samples; ++sample) {
      places_.push_back({step.buffer, sample == 0, sample + 1 == samples ? step.joins : 0});
    }
  }
}

}  // namespace invar
