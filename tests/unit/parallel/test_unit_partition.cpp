#include <mutex>
#include <numeric>
#include <set>

#include "comm/thread_communicator.h"
#include "parallel/topology.h"
#include "parallel/unit_partition.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

using Ranks = std::vector<int>;
using Groups = std::set<Ranks>;  // of world ranks

// World ranks of a group, in its order.
Ranks members(Communicator& group, int world_rank) {
  Ranks all(static_cast<size_t>(group.size()));
  const auto ranks = [](int* values, int64_t count) { return Tensor(values, DType::kI32, DeviceType::kCpu, {count}); };
  group.all_gather(Stream(DeviceType::kCpu), ranks(&world_rank, 1), ranks(all.data(), group.size()),
                   equal_counts(group.size(), 1));
  return all;
}

void check_groups(const Topology& topology, const Groups& tensor, const Groups& data) {
  Groups found_tensor, found_data;
  std::mutex mutex;
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, topology);
    const Ranks own_tensor = members(*groups.tensor, world.rank());
    const Ranks own_data = members(*groups.holders, world.rank());
    const Ranks exchange = groups.exchange ? members(*groups.exchange, world.rank()) : Ranks{};
    Ranks everybody(topology.uniform() ? 0 : static_cast<size_t>(world.size()));
    std::iota(everybody.begin(), everybody.end(), 0);
    CHECK(exchange == everybody);
    const std::lock_guard turn(mutex);
    found_tensor.insert(own_tensor);
    found_data.insert(own_data);
  });
  CHECK(found_tensor == tensor);
  CHECK(found_data == data);
}

}  // namespace

TEST_CASE("unit runs are contiguous, complete and nearly equal") {
  for (int64_t units = 0; units <= 40; ++units) {
    for (int parts = 1; parts <= 12; ++parts) {
      const auto runs = split_units(units, parts);
      REQUIRE(std::ssize(runs) == parts);
      int64_t next = 0;
      for (const Range& run : runs) {
        CHECK(run.begin == next);
        CHECK(run.size() >= units / parts);
        CHECK(run.size() <= (units + parts - 1) / parts);
        next = run.end;
      }
      CHECK(next == units);
    }
  }
}

// Between replicas of widths R < T every unit that both have must meet: by the margins of the table of common units, a
// rank of one width holds all of its units somewhere in the other, in at most R + T − 1 pieces altogether.
TEST_CASE("cuts of two widths share all units in few pieces") {
  for (int64_t units = 1; units <= 64; ++units) {
    for (int wide = 1; wide <= std::min<int64_t>(16, units); ++wide) {
      const auto wide_runs = split_units(units, wide);
      for (int narrow = 1; narrow < wide; ++narrow) {
        const auto narrow_runs = split_units(units, narrow);
        std::vector<int64_t> of_wide(wide_runs.size(), 0);
        std::vector<int64_t> of_narrow(narrow_runs.size(), 0);
        int pieces = 0;
        for (size_t w = 0; w < wide_runs.size(); ++w) {
          for (size_t n = 0; n < narrow_runs.size(); ++n) {
            const int64_t common = intersect(wide_runs[w], narrow_runs[n]).size();
            of_wide[w] += common;
            of_narrow[n] += common;
            pieces += common > 0 ? 1 : 0;
          }
        }
        bool margins = pieces <= wide + narrow - 1;
        for (size_t w = 0; w < wide_runs.size(); ++w) {
          margins = margins && of_wide[w] == wide_runs[w].size() && of_wide[w] > 0;
        }
        for (size_t n = 0; n < narrow_runs.size(); ++n) margins = margins && of_narrow[n] == narrow_runs[n].size();
        INFO(units << " units at widths " << narrow << " and " << wide);
        CHECK(margins);
      }
    }
  }
}

TEST_CASE("the rank grid has the tensor axis fastest") {
  const Topology grid{4, 2};
  CHECK(grid.world() == 8);
  CHECK(grid.tensor_rank(6) == 2);
  CHECK(grid.replica_of(6) == 1);
}

// Ranks that the narrowest replica lacks are in data groups of the wider ones alone; gradients take the exchange group,
// in which everybody is.
TEST_CASE("groups of replicas of unequal widths") {
  check_groups({4, 2, {2, 4}, {}}, {{0, 1}, {2, 3, 4, 5}}, {{0, 2}, {1, 3}, {4}, {5}});
  check_groups({8, 2, {4, 8}, {}}, {{0, 1, 2, 3}, {4, 5, 6, 7, 8, 9, 10, 11}},
               {{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8}, {9}, {10}, {11}});
  check_groups({3, 3, {3, 1, 2}, {}}, {{0, 1, 2}, {3}, {4, 5}}, {{0, 3, 4}, {1, 5}, {2}});
  check_groups({2, 2}, {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}});
}
