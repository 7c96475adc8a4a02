#include "parallel/check_inputs.h"

#include <algorithm>

#include "core/error.h"
#include "core/philox.h"
#include "parallel/first_difference.h"

namespace invar {
namespace {

constexpr int64_t kValues = 3;  // of an input: of its name, size, hash

// Without the folder, which may be another one on each host.
std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

// What the rank passes, on every rank. Collective.
int64_t value_of_rank(Communicator& world, int rank, int64_t own) {
  return all_reduce_value(world, world.rank() == rank ? own : int64_t{0}, ReduceOp::kSum);
}
std::string text_of_rank(Communicator& world, int rank, const std::string& own) {
  std::string text(static_cast<size_t>(value_of_rank(world, rank, std::ssize(own))), ' ');
  std::vector<int64_t> letters(text.size());
  if (world.rank() == rank) std::ranges::copy(own, letters.begin());
  if (!letters.empty()) world.broadcast(Stream(DeviceType::kCpu), view_of(letters), rank);
  std::ranges::transform(letters, text.begin(), [](int64_t letter) { return static_cast<char>(letter); });
  return text;
}

}  // namespace

void check_inputs(std::span<const InputPrint> inputs, Communicator& world) {
  const auto own = std::ssize(inputs);
  const int64_t most = all_reduce_value(world, own, ReduceOp::kMax);
  const auto input = [&](int64_t i) {  // of those that a rank lacks, none's
    return i < own ? inputs[static_cast<size_t>(i)] : InputPrint{"", -1, 0};
  };
  std::vector<uint64_t> values;
  for (int64_t i = 0; i < most; ++i) {
    const InputPrint print = input(i);
    values.insert(values.end(), {hash_name(file_name(print.name)), static_cast<uint64_t>(print.size), print.hash});
  }
  const auto found = first_difference(values, world);
  if (!found) return;
  const InputPrint differing = input(found->index / kValues);
  const int64_t there = value_of_rank(world, found->rank, differing.size);
  const int64_t at_rank_0 = value_of_rank(world, 0, differing.size);
  const std::string name_there = text_of_rank(world, found->rank, differing.name);
  const std::string name_at_rank_0 = text_of_rank(world, 0, differing.name);
  const bool other_name = there >= 0 && at_rank_0 >= 0 && file_name(name_there) != file_name(name_at_rank_0);
  const auto told = [&](int64_t size, const std::string& name) {
    return size < 0 ? "no such file" : other_name ? name : format("{} bytes", size);
  };
  const std::string what = other_name ? "input" : at_rank_0 < 0 ? name_there : name_at_rank_0;
  const int first = world.job_rank(0);
  throw Error(ErrorKind::kData,
              format("rank {} reads another {} than rank {}: {}", world.job_rank(found->rank), what, first,
                     there == at_rank_0 && !other_name ? format("other contents of {} bytes", there)
                                                       : format("{}, where rank {} has {}", told(there, name_there),
                                                                first, told(at_rank_0, name_at_rank_0))),
              "give all hosts the same files: copy them again, or use a folder that all hosts share");
}

}  // namespace invar
