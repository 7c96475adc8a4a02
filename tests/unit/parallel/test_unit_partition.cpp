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
  CHECK(grid.data_rank(6) == 1);
}
