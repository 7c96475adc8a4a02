#include "parallel/unit_cut.h"

#include <algorithm>

#include "comm/recording_communicator.h"
#include "parallel/leaf_cut.h"
#include "parallel/unit_partition.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using test::contains;
using test::message_of;

namespace {

UnitCut cut_of(int64_t units, int64_t leaves, int size, int rank) {
  TrafficTable traffic;
  return {units, leaves, *make_recording_communicator(rank, size, "tensor", &traffic)};
}

using Rows = std::vector<Range>;

// The units in each leaf of a sum with `repeats` dims, by all ranks together, as numbers dim · units + unit.
std::vector<std::vector<int64_t>> leaves_of_all(int64_t units, int64_t leaves, int size, int64_t repeats) {
  constexpr int64_t kRows = 3;
  std::vector<std::vector<int64_t>> all;
  for (int rank = 0; rank < size; ++rank) {
    const UnitCut cut = cut_of(units, leaves, size, rank);
    const Range mine = cut.mine();
    const auto of_rank = cut.dim(kRows, repeats);
    REQUIRE(of_rank->program.steps.size() == of_rank->rows.size());
    CHECK(of_rank->program.nodes == of_rank->plan.nodes(rank));
    int64_t rows = 0;
    for (size_t leaf = 0; leaf < of_rank->rows.size(); ++leaf) {
      CHECK(of_rank->program.steps[leaf].leaf == std::ssize(all));
      const Range held = of_rank->rows[leaf];
      REQUIRE(held.begin % kRows == 0);
      REQUIRE(held.size() % kRows == 0);
      rows += held.size();
      std::vector<int64_t>& numbers = all.emplace_back();
      for (int64_t unit = held.begin / kRows; unit < held.end / kRows; ++unit) {
        numbers.push_back(unit / mine.size() * units + mine.begin + unit % mine.size());
      }
    }
    CHECK(rows == mine.size() * repeats * kRows);
    CHECK(of_rank->plan.ranks() == size);
  }
  return all;
}

}  // namespace

TEST_CASE("without leaves units are cut as evenly as can be, and a sum over them has no order") {
  for (const int64_t units : {1, 7, 8, 96}) {
    for (const int size : {1, 2, 3, 7, 9}) {
      for (int rank = 0; rank < size; ++rank) {
        const UnitCut cut = cut_of(units, 0, size, rank);
        CHECK(cut.runs() == split_units(units, size));
        CHECK(cut.mine() == split_units(units, size)[static_cast<size_t>(rank)]);
        CHECK(cut.widest() == split_units(units, size).front().size());
        CHECK(cut.dim(4) == nullptr);
      }
    }
  }
}

TEST_CASE("ranks hold whole leaves, in order, at any number of ranks") {
  int64_t compared = 0;
  for (const int64_t units : {1, 5, 6, 8, 12, 19, 24, 96}) {
    for (const int64_t leaves : {1, 4, 6, 8, 12, 32}) {
      const int64_t count = std::min(units, leaves);
      const Rows leaf_units = split_units(units, static_cast<int>(count));
      for (const int64_t repeats : {1, 2, 3}) {
        const auto one = leaves_of_all(units, leaves, 1, repeats);
        CHECK(std::ssize(one) == count * repeats);
        for (int size = 2; size <= std::min<int64_t>(count, 9); ++size) {
          CHECK(leaves_of_all(units, leaves, size, repeats) == one);
          ++compared;
        }
      }
      for (int size = 1; size <= std::min<int64_t>(count, 9); ++size) {
        const UnitCut cut = cut_of(units, leaves, size, size - 1);
        int64_t next = 0, widest = 0;
        for (const Range& run : cut.runs()) {
          CHECK(run.begin == next);
          CHECK_FALSE(run.empty());
          CHECK(std::ranges::any_of(leaf_units, [&](const Range& leaf) { return leaf.begin == run.begin; }));
          next = run.end;
          widest = std::max(widest, run.size());
        }
        CHECK(next == units);
        CHECK(cut.widest() == widest);
        CHECK(cut.mine() == cut.runs().back());
      }
    }
  }
  CHECK(compared > 300);
}

TEST_CASE("the leaves of two dims one after another: the first of each dim, the second of each, ...") {
  // Seven units in four leaves [0, 2), [2, 4), [4, 6), [6, 7); rank 1 holds the last two, five rows per unit.
  const UnitCut cut = cut_of(7, 4, 2, 1);
  CHECK(cut.runs() == Rows{{0, 4}, {4, 7}});
  CHECK(cut.dim(5)->rows == Rows{{0, 10}, {10, 15}});
  const auto both = cut.dim(5, 2);
  CHECK(both->rows == Rows{{0, 10}, {15, 25}, {10, 15}, {25, 30}});
  CHECK(both->program.nodes == Rows{{4, 8}});
  CHECK(both->plan.total_nodes() == 2);
  CHECK(both->program.steps.front().leaf == 4);
  CHECK(cut.dim(5)->may_be_alone);
  CHECK_FALSE(both->may_be_alone);
}

TEST_CASE("more ranks than leaves are refused") {
  CHECK(contains(message_of(ErrorKind::kFault, [] { cut_of(9, 4, 5, 0); }), "4 leaves for 5 ranks"));
  CHECK(contains(message_of(ErrorKind::kFault, [] { cut_of(3, 8, 4, 0); }), "3 leaves for 4 ranks"));
}
