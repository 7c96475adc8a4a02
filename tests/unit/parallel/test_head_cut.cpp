#include "parallel/head_cut.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "comm/recording_communicator.h"
#include "config/units.h"
#include "parallel/leaf_cut.h"
#include "parallel/unit_partition.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using test::contains;
using test::message_of;

namespace {

using Rows = std::vector<Range>;

HeadCut cut_of(int64_t query, int64_t kv, int64_t leaves, int size, int rank) {
  TrafficTable traffic;
  return {query, kv, leaves, *make_recording_communicator(rank, size, "tensor", &traffic)};
}

// What each leaf of a sum over [query heads, kv heads] of all groups holds, by all ranks together: query heads as their
// numbers, the keys and values of head h as -1 - h.
std::vector<std::vector<int64_t>> leaves_of_all(int64_t query, int64_t kv, int64_t leaves, int size, int64_t kv_rows) {
  std::vector<std::vector<int64_t>> all;
  for (int rank = 0; rank < size; ++rank) {
    const HeadCut cut = cut_of(query, kv, leaves, size, rank);
    const HeadPartition& mine = cut.mine();
    const auto of_rank = cut.dim(1, kv_rows);
    REQUIRE(of_rank->plan.ranks() == size);
    CHECK(of_rank->program.nodes == of_rank->plan.nodes(rank));
    REQUIRE(of_rank->program.steps.size() == of_rank->rows.size());
    for (size_t leaf = 0; leaf < of_rank->rows.size(); ++leaf) {
      CHECK(of_rank->program.steps[leaf].leaf == std::ssize(all));
      std::vector<int64_t>& held = all.emplace_back();
      for (int64_t row = of_rank->rows[leaf].begin; row < of_rank->rows[leaf].end; ++row) {
        const int64_t group = row / (mine.heads_per_group + kv_rows), rest = row % (mine.heads_per_group + kv_rows);
        const bool is_query = rest < mine.heads_per_group;
        held.push_back(is_query ? mine.query_heads.begin + group * mine.heads_per_group + rest
                                : -1 - (mine.kv_heads.begin + group));
      }
    }
  }
  return all;
}

// One call of attention for all heads of the rank.
bool is_one_call(const HeadCut& cut) {
  const std::vector<HeadCall> calls = cut.calls();
  const HeadPartition& mine = cut.mine();
  return calls.size() == 1 && calls[0].groups == Range{0, mine.kv_heads.size()} &&
         calls[0].heads == Range{0, mine.heads_per_group} && calls[0].runs == Range{0, 1} && calls[0].first == 0;
}

// Where a group of a view begins, in heads.
int64_t head_of(const ops::HeadView& view, int64_t group) {
  return (view.offset + group * view.group_stride) / view.head_dim;
}

}  // namespace

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
          CHECK(part.replicated ==
                (tensor > kv && partition_heads(query, kv, 0, tensor, rank).heads_per_group < group));
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

TEST_CASE("a group's query heads are cut where the KV heads are too few leaves") {
  CHECK(head_runs(2, 8, 8) == 1);  // Qwen3-0.6B
  CHECK(head_runs(2, 8, 4) == 1);
  CHECK(head_runs(2, 8, 9) == 2);
  CHECK(head_runs(8, 1, 8) == 8);  // Gemma 4 E2B
  CHECK(head_runs(8, 1, 3) == 3);
  CHECK(head_runs(4, 2, 8) == 4);  // E4B
  CHECK(head_runs(4, 2, 5) == 3);
  CHECK(head_runs(1, 4, 8) == 1);  // no more than there are
  CHECK(head_runs(3, 2, 1024) == 3);
}

TEST_CASE("in invariant numerics a rank holds whole runs of query heads and the KV heads they need") {
  int64_t compared = 0;
  for (const int64_t kv : {1, 2, 3, 4}) {
    for (const int64_t group : {1, 2, 3, 4, 5}) {
      for (const int64_t leaves : {1, 2, 4, 6, 8}) {
        const int64_t query = kv * group, runs = head_runs(group, kv, leaves);
        const int64_t most = std::min(leaves, kv) * runs;
        const auto one = leaves_of_all(query, kv, leaves, 1, 2);
        const auto queries = leaves_of_all(query, kv, leaves, 1, 0);
        CHECK(std::ssize(queries) == most);
        CHECK(std::ssize(one) == (runs == 1 ? most : most + kv));
        for (int size = 1; size <= most; ++size) {
          CHECK(leaves_of_all(query, kv, leaves, size, 2) == one);
          CHECK(leaves_of_all(query, kv, leaves, size, 0) == queries);
          const std::vector<Range> held = head_leaves(kv, group, leaves, size);
          REQUIRE(std::ssize(held) == size);
          int64_t next = 0, next_query = 0;
          for (int rank = 0; rank < size; ++rank) {
            const Range mine = held[static_cast<size_t>(rank)];
            CHECK(mine.begin == next);
            CHECK_FALSE(mine.empty());
            next = mine.end;
            const HeadPartition part = partition_heads(query, kv, leaves, size, rank);
            CHECK(part.query_heads.begin == next_query);
            next_query = part.query_heads.end;
            CHECK(part.replica_color == partition_heads(query, kv, 0, size, rank).replica_color);  // as groups are made
          }
          CHECK(next == most);
          CHECK(next_query == query);
          ++compared;
        }
      }
    }
  }
  CHECK(compared > 300);
}

TEST_CASE("the first rank with a KV head counts for it, and every run adds to its gradient once") {
  for (const int64_t kv : {1, 2, 3}) {
    constexpr int64_t kGroup = 5, kLeaves = 9;
    const int64_t runs = head_runs(kGroup, kv, kLeaves);
    for (int size = 1; size <= kv * runs; ++size) {
      std::vector<int64_t> covered(static_cast<size_t>(kv), 0);
      for (int rank = 0; rank < size; ++rank) {
        const HeadCut cut = cut_of(kv * kGroup, kv, kLeaves, size, rank);
        const std::vector<int64_t> queries = cut.query_heads_of_ranks(), kvs = cut.kv_heads_of_ranks();
        CHECK(std::reduce(queries.begin(), queries.end()) == kv * kGroup);
        CHECK(std::reduce(kvs.begin(), kvs.end()) == kv);
        const HeadPartition& mine = cut.mine();
        CHECK(queries[static_cast<size_t>(rank)] == mine.query_heads.size());
        const bool first = mine.query_heads.begin == mine.kv_heads.begin * kGroup;
        CHECK(kvs[static_cast<size_t>(rank)] == (first ? mine.kv_heads.size() : 0));

        REQUIRE(cut.run_sum() != nullptr);
        const LeafCut& sum = *cut.run_sum();
        CHECK(sum.plan.ranks() == mine.replicas.size());
        int64_t next = 0;
        for (const Range& run : sum.rows) {
          CHECK(run.begin == next);
          next = run.end;
        }
        CHECK(next == mine.heads_per_group);
        for (int64_t head = mine.kv_heads.begin; head < mine.kv_heads.end; ++head) {
          for (const LeafProgram::Step& step : sum.program.steps) {
            CHECK(step.leaf == covered[static_cast<size_t>(head)]++);
          }
        }
      }
      for (const int64_t leaves : covered) CHECK(leaves == runs);
    }
  }
}

TEST_CASE("a KV head on three ranks") {
  // Of one KV head with five query heads in four runs, of 2, 1, 1 and 1 heads, rank 1 has the last but one.
  const HeadCut middle = cut_of(5, 1, 4, 3, 1);
  CHECK(middle.mine().query_heads == Range{3, 4});
  CHECK(middle.dim(10, 2)->rows == Rows{{0, 10}});
  CHECK(middle.run_sum()->program.nodes == Rows{{2, 3}});
  const HeadCut first = cut_of(5, 1, 4, 3, 0);
  CHECK(first.mine().query_heads == Range{0, 3});
  CHECK(first.dim(10, 2)->rows == Rows{{30, 50}, {0, 20}, {20, 30}});  // k and v, two runs
  CHECK(first.dim(10, 0)->rows == Rows{{0, 20}, {20, 30}});
  CHECK(first.dim(10, 2)->program.nodes == Rows{{0, 3}});
  CHECK(first.run_sum()->program.nodes == Rows{{0, 2}});
  CHECK(first.dim(10, 0)->may_be_alone);
  CHECK_FALSE(first.dim(10, 2)->may_be_alone);  // the first rank has k and v, and a run
  CHECK(contains(message_of(ErrorKind::kFault, [] { cut_of(5, 1, 4, 5, 0); }), "4 leaves for 5 ranks"));
  CHECK(contains(message_of(ErrorKind::kFault, [] { cut_of(8, 2, 2, 3, 0); }), "1 leaves for 2 ranks"));
}

TEST_CASE("without runs a group is a leaf, and without leaves there is no order") {
  for (int rank = 0; rank < 2; ++rank) {
    const HeadCut whole = cut_of(8, 4, 4, 2, rank);
    CHECK(whole.run_sum() == nullptr);
    CHECK(is_one_call(whole));
    TrafficTable traffic;
    const UnitCut units(4, 4, *make_recording_communicator(rank, 2, "tensor", &traffic));
    CHECK(whole.dim(3, 2)->rows == units.dim(12)->rows);
    CHECK(whole.dim(3, 2)->may_be_alone);
    CHECK(whole.mine().kv_heads == units.mine());
    const HeadCut any = cut_of(8, 1, 0, 2, rank);
    CHECK(any.dim(3, 2) == nullptr);
    CHECK(any.run_sum() == nullptr);
    CHECK(is_one_call(any));
  }
}

TEST_CASE("calls of attention compute every run of every group once, each with its group's keys, in few calls") {
  constexpr int64_t kDim = 4;
  int64_t several_groups = 0, several_runs = 0;
  for (const int64_t kv : {1, 2, 3, 4}) {
    for (const int64_t group : {1, 3, 4, 5}) {
      for (const int64_t leaves : {0, 4, 6, 9, 32}) {
        const int64_t most = leaves == 0 ? kv * group : std::min(leaves, kv) * head_runs(group, kv, leaves);
        for (int size = 1; size <= most; ++size) {
          for (int rank = 0; rank < size; ++rank) {
            const HeadCut cut = cut_of(kv * group, kv, leaves, size, rank);
            const int64_t groups = cut.mine().kv_heads.size(), heads = cut.mine().heads_per_group;
            const Rows runs = cut.run_sum() == nullptr ? Rows{{0, heads}} : cut.run_sum()->rows;
            // Heads of this rank as attention lays them out: a group's queries, keys and values.
            const int64_t stride = (heads + 2) * kDim;
            const ops::HeadView q{Tensor(), groups, heads, kDim, stride, 0};
            const ops::HeadView k{Tensor(), groups, 1, kDim, stride, heads * kDim};
            std::map<std::pair<int64_t, int64_t>, int> computed;  // by group and first head of a run
            int64_t first = 0;
            for (const HeadCall& call : cut.calls()) {
              CHECK(call.first == first);
              first += call.query_heads();
              const ops::HeadView queries = call.queries(q), keys = call.keys(k);
              REQUIRE(queries.groups == call.groups.size() * call.runs.size());
              REQUIRE(keys.groups == queries.groups);
              CHECK(queries.groups * queries.heads_per_group == call.query_heads());
              for (int64_t i = 0; i < queries.groups; ++i) {
                const int64_t of_group = head_of(queries, i) / (heads + 2), head = head_of(queries, i) % (heads + 2);
                CHECK(head_of(keys, i) == of_group * (heads + 2) + heads);
                CHECK(std::ranges::count(runs, Range{head, head + queries.heads_per_group}) == 1);
                ++computed[{of_group, head}];
              }
              several_groups += call.groups.size() > 1 && runs.size() > 1 ? 1 : 0;
              several_runs += call.runs.size() > 1 ? 1 : 0;
            }
            CHECK(first == cut.mine().query_heads.size());
            CHECK(std::ssize(computed) == groups * std::ssize(runs));
            for (const auto& [run, times] : computed) CHECK(times == 1);
            CHECK(std::ssize(cut.calls()) <= std::min(std::ssize(runs), 2 * groups));  // runs have two lengths
          }
        }
      }
    }
  }
  CHECK(several_groups > 10);
  CHECK(several_runs > 10);
}
