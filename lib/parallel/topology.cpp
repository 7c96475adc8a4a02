#include "parallel/topology.h"

#include <algorithm>
#include <numeric>

namespace invar {
namespace {

constexpr const char* kDataGroup = "data";
constexpr const char* kExchangeGroup = "gradients";

}  // namespace

int Topology::first_rank(int data_rank) const {
  if (uniform()) return tensor * data_rank;
  return std::reduce(widths.begin(), widths.begin() + data_rank);
}

int Topology::data_rank(int world_rank) const {
  if (uniform()) return world_rank / tensor;
  int replica = 0;
  for (int first = 0; first + width(replica) <= world_rank; ++replica) first += width(replica);
  return replica;
}

Range Topology::samples_of(int64_t batch, int data_rank) const {
  if (samples.empty()) return {batch / data * data_rank, batch / data * (data_rank + 1)};
  const int64_t first = std::reduce(samples.begin(), samples.begin() + data_rank);
  return {first, first + samples[static_cast<size_t>(data_rank)]};
}

std::string Topology::describe_micro_steps(int64_t batch, int64_t micro_batch) const {
  std::string steps;
  for (int replica = 0; replica < (uniform() ? 1 : data); ++replica) {
    steps += format("{}{}", steps.empty() ? "" : ", ", samples_of(batch, replica).size() / micro_batch);
  }
  return steps;
}

std::string Topology::describe(bool sequence_parallel) const {
  std::string ranks = std::to_string(tensor);
  if (!uniform()) {
    ranks.clear();
    for (const int width : widths) ranks += format("{}{}", ranks.empty() ? "" : ", ", width);
  }
  return format("tensor {}{} x data {}", ranks, sequence_parallel && tensor > 1 ? " with sequence parallelism" : "",
                data);
}

Topology topology_of(const ReplicaPlan& plan) {
  const int widest = *std::max_element(plan.widths.begin(), plan.widths.end());
  const auto replicas = static_cast<int>(plan.widths.size());
  if (plan.uniform()) return {widest, replicas};
  return {widest, replicas, plan.widths, plan.samples};
}

GroupMaker::GroupMaker(TrafficTable* traffic)
    : peerless_([traffic](int rank, int size, std::string name) {
        return make_recording_communicator(rank, size, std::move(name), traffic);
      }) {}

std::unique_ptr<Communicator> GroupMaker::make(Communicator& parent, const std::vector<int>& colors,
                                               std::string name) const {
  INVAR_CHECK(std::ssize(colors) == parent.size(), "{} colors for {} ranks", colors.size(), parent.size());
  const auto me = colors.begin() + parent.rank();
  if (peerless_) {
    const auto rank = static_cast<int>(std::count(colors.begin(), me, *me));
    const auto size = static_cast<int>(std::count(colors.begin(), colors.end(), *me));
    return peerless_(rank, size, std::move(name));
  }
  return parent.split(*me, parent.rank(), std::move(name));
}

ProcessGroups make_process_groups(Communicator& world, const Topology& topology, const GroupMaker& maker) {
  INVAR_CHECK(topology.world() == world.size(), "a grid of {} ranks on {}", topology.world(), world.size());
  std::vector<int> tensor_colors;
  std::vector<int> data_colors;
  for (int rank = 0; rank < world.size(); ++rank) {
    tensor_colors.push_back(topology.data_rank(rank));
    data_colors.push_back(topology.tensor_rank(rank));
  }
  ProcessGroups groups;
  groups.topology = topology;
  groups.world = &world;
  groups.tensor = maker.make(world, tensor_colors, "tensor");
  groups.data = maker.make(world, data_colors, kDataGroup);
  if (!topology.uniform()) {
    groups.exchange = maker.make(world, std::vector<int>(static_cast<size_t>(world.size())), kExchangeGroup);
  }
  groups.maker = maker;
  return groups;
}

int64_t bytes_between_replicas(const TrafficTable& traffic) {
  int64_t bytes = 0;
  for (const auto& [name, sent] : traffic) {
    if (sent.group == kDataGroup || sent.group == kExchangeGroup) bytes += sent.bytes;
  }
  return bytes;
}

int64_t sum_over_replicas(const ProcessGroups& groups, int64_t value) {
  if (groups.topology.uniform()) return all_reduce_value(*groups.data, value, ReduceOp::kSum);
  return all_reduce_value(*groups.world, groups.tensor->rank() == 0 ? value : 0, ReduceOp::kSum);
}

double sum_over_replicas(const ProcessGroups& groups, const ExactSum& value) {
  if (groups.topology.uniform()) return all_reduce_value(*groups.data, value);
  return all_reduce_value(*groups.world, groups.tensor->rank() == 0 ? value : ExactSum());
}

}  // namespace invar
