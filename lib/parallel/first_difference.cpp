#include "parallel/first_difference.h"

#include <algorithm>

namespace invar {

std::optional<Difference> first_difference(const std::vector<uint64_t>& values, Communicator& world) {
  std::vector<int64_t> first(values.size());
  if (world.rank() == 0)
    std::ranges::transform(values, first.begin(), [](uint64_t v) { return static_cast<int64_t>(v); });
  world.all_reduce(Stream(DeviceType::kCpu), view_of(first), ReduceOp::kSum);
  const auto none = std::ssize(values);
  int64_t own = 0;
  while (own < none && static_cast<uint64_t>(first[static_cast<size_t>(own)]) == values[static_cast<size_t>(own)])
    ++own;
  const int64_t index = all_reduce_value(world, own, ReduceOp::kMin);
  if (index == none) return std::nullopt;
  const int64_t rank = all_reduce_value(world, int64_t{own == index ? world.rank() : world.size()}, ReduceOp::kMin);
  return Difference{index, static_cast<int>(rank)};
}

}  // namespace invar
