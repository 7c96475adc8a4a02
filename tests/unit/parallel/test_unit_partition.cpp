#include "parallel/topology.h"
#include "parallel/unit_partition.h"
#include "support/catch.h"

using namespace invar;

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

TEST_CASE("the rank grid has the tensor axis fastest") {
  const Topology grid{4, 2};
  CHECK(grid.world() == 8);
  CHECK(grid.tensor_rank(6) == 2);
  CHECK(grid.data_rank(6) == 1);
}
