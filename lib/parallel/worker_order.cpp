#include "parallel/worker_order.h"

#include "config/contract.h"
#include "core/error.h"

namespace invar {
namespace {

std::vector<Range> deal_workers(int64_t workers, int64_t batch, int data_size) {
  INVAR_CHECK(1 <= workers && workers <= batch, "{} workers for {} samples", workers, batch);
  if (batch % data_size != 0 || !begins_with_workers(data_size, workers, batch)) {
    throw Error(ErrorKind::kConfig,
                format("{} samples over {} data-parallel ranks do not part where those of {} workers do", batch,
                       data_size, workers),
                "choose numerics.workers as a multiple of the ranks and a divisor of train.global_batch_size");
  }
  std::vector<Range> runs;
  for (int rank = 0; rank < data_size; ++rank) runs.push_back(workers_of(rank, data_size, workers, batch));
  return runs;
}

}  // namespace

WorkerOrder::WorkerOrder(int64_t workers, int64_t batch, int data_size, int data_rank)
    : WorkerOrder(batch, deal_workers(workers, batch, data_size), workers, data_rank) {}

WorkerOrder::WorkerOrder(int64_t batch, const std::vector<Range>& workers_of_ranks, int64_t workers, int data_rank)
    : plan_(workers, workers_of_ranks),
      program_(leaf_program(workers, workers_of_ranks[static_cast<size_t>(data_rank)], LeafKind::kOwnBuffer)) {
  for (const LeafProgram::Step& step : program_.steps) {
    const int64_t samples = first_sample(step.leaf + 1, workers, batch) - first_sample(step.leaf, workers, batch);
    for (int64_t sample = 0; sample < samples; ++sample) {
      places_.push_back({step.buffer, sample == 0, sample + 1 == samples ? step.joins : 0});
    }
  }
}

}  // namespace invar
