#include "parallel/check_plan.h"

#include "core/error.h"

namespace invar {

void check_plan(const ReplicaPlan& plan, Communicator& world) {
  const auto own = static_cast<int64_t>(plan.hash());
  const int64_t first = all_reduce_value(world, world.rank() == 0 ? own : 0, ReduceOp::kSum);
  const int64_t rank = all_reduce_value(world, int64_t{own == first ? world.size() : world.rank()}, ReduceOp::kMin);
  if (rank == world.size()) return;
  throw Error(ErrorKind::kConfig, format("rank {} plans other replicas than rank 0", rank),
              "give every rank the same config, with the same parallel.nonuniform");
}

}  // namespace invar
