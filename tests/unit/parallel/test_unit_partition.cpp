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

TEST_CASE("query heads are held once, KV heads by every rank that has their queries") {
  for (const int64_t kv : {1, 2, 3, 4, 8}) {
    for (const int64_t group : {1, 2, 3, 4, 5}) {
      const int64_t query = kv * group;
      for (int tensor = 1; tensor <= query; ++tensor) {
        std::vector<int> held(static_cast<size_t>(query), 0);
        std::vector<int> first_color(static_cast<size_t>(kv), -1);
        for (int rank = 0; rank < tensor; ++rank) {
          const HeadPartition part = partition_heads(query, kv, 0, tensor, rank);
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
          CHECK(part.replicated == (tensor > kv && partition_heads(query, kv, 0, tensor, rank).heads_per_group < group));
        }
        for (const int count : held) CHECK(count == 1);
      }
    }
  }
}

TEST_CASE("head partition of the reference models") {
  // 8 query and 4 KV heads on three ranks: groups 2, 1, 1.
  CHECK(partition_heads(8, 4, 0, 3, 0).kv_heads == Range{0, 2});
  CHECK(partition_heads(8, 4, 0, 3, 1).kv_heads == Range{2, 3});
  CHECK(partition_heads(8, 4, 0, 3, 2).query_heads == Range{6, 8});
  // 8 query and 2 KV heads on eight ranks: one query head each, four copies of a KV head.
  const HeadPartition last = partition_heads(8, 2, 0, 8, 7);
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
