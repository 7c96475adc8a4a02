#include "parallel/check_inputs.h"

#include <algorithm>

#include "core/error.h"
#include "parallel/first_difference.h"

namespace invar {

void check_inputs(std::span<const InputPrint> inputs, Communicator& world) {
  const auto own = std::ssize(inputs);
  const int64_t most = all_reduce_value(world, own, ReduceOp::kMax);
  std::vector<uint64_t> values;  // size and hash of each; of those that a rank lacks, none's
  for (int64_t i = 0; i < most; ++i) {
    const InputPrint print = i < own ? inputs[static_cast<size_t>(i)] : InputPrint{"", -1, 0};
    values.push_back(static_cast<uint64_t>(print.size));
    values.push_back(print.hash);
  }
  const auto found = first_difference(values, world);
  if (!found) return;
  const auto size_of_rank = [&](int64_t rank) {
    const auto size = static_cast<int64_t>(values[static_cast<size_t>(found->index / 2 * 2)]);
    return all_reduce_value(world, world.rank() == rank ? size : int64_t{0}, ReduceOp::kSum);
  };
  const int64_t there = size_of_rank(found->rank);
  const int64_t at_rank_0 = size_of_rank(0);
  const std::string name = found->index / 2 < own ? inputs[static_cast<size_t>(found->index / 2)].name : "an input";
  const auto told = [](int64_t size) { return size < 0 ? std::string("no such file") : format("{} bytes", size); };
  throw Error(ErrorKind::kData,
              format("rank {} reads another {} than rank 0: {}", found->rank, name,
                     there == at_rank_0 ? format("other contents of {} bytes", there)
                                        : format("{}, where rank 0 has {}", told(there), told(at_rank_0))),
              "give all hosts the same files: copy them again, or use a folder that all hosts share");
}

}  // namespace invar
