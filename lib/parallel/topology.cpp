#include "parallel/topology.h"

#include <algorithm>

namespace invar {

std::string Topology::describe(bool sequence_parallel) const {
  return format("tensor {}{} x data {}", tensor, sequence_parallel && tensor > 1 ? " with sequence parallelism" : "",
                data);
}

std::unique_ptr<Communicator> GroupMaker::make(Communicator& parent, const std::vector<int>& colors,
                                               std::string name) const {
  INVAR_CHECK(std::ssize(colors) == parent.size(), "{} colors for {} ranks", colors.size(), parent.size());
  const auto me = colors.begin() + parent.rank();
  if (traffic_ != nullptr) {
    const auto rank = static_cast<int>(std::count(colors.begin(), me, *me));
    const auto size = static_cast<int>(std::count(colors.begin(), colors.end(), *me));
    return make_recording_communicator(rank, size, std::move(name), traffic_);
  }
  return parent.split(*me, parent.rank(), std::move(name));
}

ProcessGroups make_process_groups(Communicator& world, Topology topology, GroupMaker maker) {
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
  groups.data = maker.make(world, data_colors, "data");
  groups.maker = maker;
  return groups;
}

}  // namespace invar
