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

TEST_CASE("query heads are held once, KV heads by every rank that has their queries") {
  for (const int64_t kv : {1, 2, 3, 4, 8}) {
    for (const int64_t group : {1, 2, 3, 4, 5}) {
      const int64_t query = kv * group;
      for (int tensor = 1; tensor <= query; ++tensor) {
        std::vector<int> held(static_cast<size_t>(query), 0);
        std::vector<int> first_color(static_cast<size_t>(kv), -1);
        for (int rank = 0; rank < tensor; ++rank) {
          const HeadPartition part = partition_heads(query, kv, tensor, rank);
          REQUIRE(part.query_heads.size() == part.kv_heads.size() * part.heads_per_group);
          for (int64_t h = part.query_heads.begin; h < part.query_heads.end; ++h) {
            ++held[static_cast<size_t>(h)];
            CHECK(part.kv_heads.contains(h / group));
          }
          for (int64_t h = part.kv_heads.begin; h < part.kv_heads.end; ++h) {
            int& color = first_color[static_cast<size_t>(h)];
            if (color < 0) color = part.replica_color;
            CHECK(color == part.replica_color);  // copies of a KV head share a color
          }
          CHECK(part.replicated == (tensor > kv && partition_heads(query, kv, tensor, rank).heads_per_group < group));
        }
        for (const int count : held) CHECK(count == 1);
      }
    }
  }
}

TEST_CASE("head partition of the reference models") {
  // 8 query and 4 KV heads on three ranks: groups 2, 1, 1.
  CHECK(partition_heads(8, 4, 3, 0).kv_heads == Range{0, 2});
  CHECK(partition_heads(8, 4, 3, 1).kv_heads == Range{2, 3});
  CHECK(partition_heads(8, 4, 3, 2).query_heads == Range{6, 8});
  // 8 query and 2 KV heads on eight ranks: one query head each, four copies of a KV head.
  const HeadPartition last = partition_heads(8, 2, 8, 7);
  CHECK(last.query_heads == Range{7, 8});
  CHECK(last.kv_heads == Range{1, 2});
  CHECK(last.replicated);
}

TEST_CASE("the rank grid has the tensor axis fastest") {
  const Topology grid{4, 2};
  CHECK(grid.world() == 8);
  CHECK(grid.tensor_rank(6) == 2);
  CHECK(grid.data_rank(6) == 1);
}
