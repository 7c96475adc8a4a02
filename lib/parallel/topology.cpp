#include "parallel/topology.h"

#include <algorithm>
#include <numeric>

namespace invar {
namespace {

constexpr const char* kDataGroup = "data";
constexpr const char* kExchangeGroup = "gradients";

// A rank's coordinates along some axes as one number, the innermost axis counting fastest, and how many there are.
struct Place {
  int index = 0;
  int size = 1;
};

template <class In>
Place place_of(const std::vector<Axis>& axes, int rank, In in) {
  Place place;
  for (const Axis& axis : axes) {
    if (in(axis)) {
      place.index += rank % axis.size * place.size;
      place.size *= axis.size;
    }
    rank /= axis.size;
  }
  return place;
}

bool is_copied(const Axis& axis) {
  return !axis.cuts_weights;
}
bool is_read_apart(const Axis& axis) {
  return axis.cuts_samples;
}

}  // namespace

std::vector<Axis> Topology::axes() const {
  std::vector<Axis> axes = {{"tensor", tensor, true, false}};
  axes.insert(axes.end(), between.begin(), between.end());
  axes.push_back({"data", data, false, true});
  return axes;
}

int Topology::world() const {
  if (!uniform()) return std::reduce(widths.begin(), widths.end());
  return place_of(axes(), 0, [](const Axis&) { return true; }).size;
}

int Topology::row_of(int world_rank) const {
  if (uniform()) return world_rank / tensor;
  int row = 0;
  for (int first = 0; first + width(row) <= world_rank; ++row) first += width(row);
  return row;
}

int Topology::replicas() const {
  return uniform() ? place_of(axes(), 0, is_copied).size : data;
}

int Topology::replica_of(int world_rank) const {
  return uniform() ? place_of(axes(), world_rank, is_copied).index : row_of(world_rank);
}

int Topology::readers() const {
  return uniform() ? place_of(axes(), 0, is_read_apart).size : data;
}

int Topology::reader_of(int world_rank) const {
  return uniform() ? place_of(axes(), world_rank, is_read_apart).index : row_of(world_rank);
}

int Topology::first_rank(int replica) const {
  if (uniform()) return tensor * replica;
  return std::reduce(widths.begin(), widths.begin() + replica);
}

Range Topology::samples_of(int64_t batch, int reader) const {
  if (samples.empty()) return {batch / readers() * reader, batch / readers() * (reader + 1)};
  const int64_t first = std::reduce(samples.begin(), samples.begin() + reader);
  return {first, first + samples[static_cast<size_t>(reader)]};
}

std::string Topology::describe_micro_steps(int64_t batch, int64_t micro_batch) const {
  std::string steps;
  for (int reader = 0; reader < (uniform() ? 1 : data); ++reader) {
    steps += format("{}{}", steps.empty() ? "" : ", ", samples_of(batch, reader).size() / micro_batch);
  }
  return steps;
}

std::string Topology::describe(bool sequence_parallel) const {
  std::string ranks = std::to_string(tensor);
  if (!uniform()) {
    ranks.clear();
    for (const int width : widths) ranks += format("{}{}", ranks.empty() ? "" : ", ", width);
  }
  std::string others;
  for (const Axis& axis : between) others += format(" x {} {}", axis.name, axis.size);
  return format("tensor {}{}{} x data {}", ranks, sequence_parallel && tensor > 1 ? " with sequence parallelism" : "",
                others, data);
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
  const auto make = [&](const char* name, auto color_of) {
    std::vector<int> colors;
    for (int rank = 0; rank < world.size(); ++rank) colors.push_back(color_of(rank));
    return maker.make(world, colors, name);
  };
  // A group's ranks differ along the axes that are `in`, and along no other.
  const std::vector<Axis> axes = topology.axes();
  for (const Axis& axis : axes) {
    INVAR_CHECK(axis.cuts_weights || axis.cuts_samples, "ranks along the axis '{}' would all do the same", axis.name);
  }
  const auto along = [&](auto in) {
    return [&axes, in](int rank) { return place_of(axes, rank, [in](const Axis& axis) { return !in(axis); }).index; };
  };
  ProcessGroups groups;
  groups.topology = topology;
  groups.world = &world;
  if (topology.uniform()) {
    const auto is_tensor = [&](const Axis& axis) { return axis.name == axes.front().name; };
    groups.tensor = make("tensor", along(is_tensor));
    groups.holders = make(kDataGroup, along(is_copied));
    const bool apart = std::ranges::any_of(
        axes, [](const Axis& axis) { return axis.size > 1 && is_copied(axis) != is_read_apart(axis); });
    if (apart) groups.readers_apart = make("readers", along(is_read_apart));
  } else {
    groups.tensor = make("tensor", [&](int rank) { return topology.replica_of(rank); });
    groups.holders = make(kDataGroup, [&](int rank) { return topology.tensor_rank(rank); });
    groups.exchange = make(kExchangeGroup, [](int) { return 0; });
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

int64_t sum_over_readers(const ProcessGroups& groups, int64_t value) {
  if (groups.topology.uniform()) return all_reduce_value(groups.readers(), value, ReduceOp::kSum);
  return all_reduce_value(*groups.world, groups.tensor->rank() == 0 ? value : 0, ReduceOp::kSum);
}

double sum_over_readers(const ProcessGroups& groups, const ExactSum& value) {
  if (groups.topology.uniform()) return all_reduce_value(groups.readers(), value);
  return all_reduce_value(*groups.world, groups.tensor->rank() == 0 ? value : ExactSum());
}

}  // namespace invar
