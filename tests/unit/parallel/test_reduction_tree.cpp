#include "parallel/reduction_tree.h"

#include <algorithm>
#include <map>

#include "support/catch.h"
#include "support/errors.h"
#include "tree_values.h"

namespace invar {
namespace {

using test::contains;
using test::message_of;
using Nodes = std::vector<Range>;

void add_nodes(int64_t begin, int64_t end, Nodes* nodes) {
  nodes->push_back({begin, end});
  if (end - begin == 1) return;
  const int64_t middle = begin + (end - begin + 1) / 2;
  add_nodes(begin, middle, nodes);
  add_nodes(middle, end, nodes);
}

// The nodes inside the run that are in no other node inside it.
Nodes largest_nodes(const Nodes& all, Range run) {
  Nodes inside, largest;
  for (const Range& node : all) {
    if (run.begin <= node.begin && node.end <= run.end) inside.push_back(node);
  }
  for (const Range& node : inside) {
    const bool in_another = std::ranges::any_of(inside, [&](const Range& other) {
      return other.begin <= node.begin && node.end <= other.end && other != node;
    });
    if (!in_another) largest.push_back(node);
  }
  std::ranges::sort(largest, {}, &Range::begin);
  return largest;
}

size_t most_nodes(int64_t leaves) {
  size_t most = 0;
  for (int64_t begin = 0; begin < leaves; ++begin) {
    for (int64_t end = begin + 1; end <= leaves; ++end) most = std::max(most, cover(leaves, {begin, end}).size());
  }
  return most;
}

// The two are added: they must be a node's children.
Range joined(const Nodes& all, Range left, Range right) {
  const Range node{left.begin, right.end};
  REQUIRE(left.end == right.begin);
  REQUIRE(std::ranges::count(all, node) == 1);
  REQUIRE(left.size() == (node.size() + 1) / 2);
  return node;
}

// What the buffers hold after the program.
Nodes run_program(const Nodes& all, const LeafProgram& program) {
  Nodes buffers(static_cast<size_t>(program.buffers));
  for (const LeafProgram::Step& step : program.steps) {
    auto at = static_cast<size_t>(step.buffer);
    REQUIRE(at < buffers.size());
    const Range leaf{step.leaf, step.leaf + 1};
    buffers[at] = step.accumulate ? joined(all, buffers[at], leaf) : leaf;
    for (int join = 0; join < step.joins; ++join, --at) buffers[at - 1] = joined(all, buffers[at - 1], buffers[at]);
  }
  buffers.resize(program.nodes.size());
  return buffers;
}

// What is left on the stack after the program, of leaves that lie in rows from `first` on.
Range run_program(const Nodes& all, const ops::SumProgram& program, int64_t first) {
  Nodes stack;
  for (size_t term = 0; term < static_cast<size_t>(program.terms); ++term) {
    const int64_t leaf = first + program.rows[term];
    stack.push_back({leaf, leaf + 1});
    for (int join = 0; join < program.joins[term]; ++join) {
      REQUIRE(stack.size() >= 2);
      const Range right = stack.back();
      stack.pop_back();
      stack.back() = joined(all, stack.back(), right);
    }
  }
  REQUIRE(stack.size() == 1);
  return stack.front();
}

int buffers_of(int64_t leaves, LeafKind kind) {
  return leaf_program(leaves, {0, leaves}, kind).buffers;
}

}  // namespace

TEST_CASE("a node's left child is the longer one") {
  CHECK((children({0, 8}).left == Range{0, 4} && children({0, 8}).right == Range{4, 8}));
  CHECK((children({3, 6}).left == Range{3, 5} && children({3, 6}).right == Range{5, 6}));
  CHECK(contains(message_of(ErrorKind::kFault, [] { children({3, 4}); }), "node [3, 4) has no children"));
}

TEST_CASE("covers of three ranks with 3, 3 and 2 of 8 leaves") {
  CHECK(cover(8, {0, 3}) == Nodes{{0, 2}, {2, 3}});
  CHECK(cover(8, {3, 6}) == Nodes{{3, 4}, {4, 6}});
  CHECK(cover(8, {6, 8}) == Nodes{{6, 8}});
  CHECK(cover(8, {5, 5}).empty());
  CHECK(contains(message_of(ErrorKind::kFault, [] { cover(8, {6, 9}); }), "leaves [6, 9) of 8"));

  const Nodes runs{{0, 3}, {3, 6}, {6, 8}};
  const TreePlan plan(8, runs);
  CHECK(plan.total_nodes() == 5);
  CHECK(plan.rounds() == 2);
  CHECK(plan.rows_of_round(0) == Range{0, 3});  // [0, 2), [3, 4), [6, 8)
  CHECK(plan.rows_of_round(1) == Range{3, 5});  // [2, 3), [4, 6)
  const ops::SumProgram& program = plan.program();
  const std::vector<int> rows(program.rows.begin(), program.rows.begin() + 5);
  const std::vector<int> joins(program.joins.begin(), program.joins.begin() + 5);
  CHECK(rows == std::vector<int>{0, 3, 1, 4, 2});
  // [2, 4) = [2, 3) + [3, 4) and [0, 4) = [0, 2) + [2, 4); [4, 8) = [4, 6) + [6, 8) and the root.
  CHECK(joins == std::vector<int>{0, 0, 2, 0, 2});
}

TEST_CASE("every run of up to 40 leaves: one leaf after another gives the cover, in additions of siblings alone") {
  for (int64_t leaves = 1; leaves <= 40; ++leaves) {
    Nodes all;
    add_nodes(0, leaves, &all);
    for (int64_t begin = 0; begin < leaves; ++begin) {
      for (int64_t end = begin; end <= leaves; ++end) {
        const Nodes nodes = cover(leaves, {begin, end});
        REQUIRE(nodes == largest_nodes(all, {begin, end}));
        for (const Range& node : nodes) {
          REQUIRE(run_program(all, node_program(leaves, node, begin), begin) == node);
        }
        for (const LeafKind kind : {LeafKind::kAddable, LeafKind::kOwnBuffer}) {
          const LeafProgram program = leaf_program(leaves, {begin, end}, kind);
          REQUIRE(program.nodes == nodes);
          REQUIRE(std::ssize(program.steps) == end - begin);
          REQUIRE(run_program(all, program) == nodes);
          const bool accumulates = std::ranges::any_of(program.steps, &LeafProgram::Step::accumulate);
          REQUIRE((kind == LeafKind::kAddable || !accumulates));
        }
      }
    }
  }
}

TEST_CASE("the most nodes that a run can have") {
  const std::map<int64_t, size_t> most{{8, 4}, {16, 6}, {32, 8}, {64, 10}, {128, 12}, {24, 7}, {48, 9}, {96, 11}};
  for (const auto& [leaves, nodes] : most) CHECK(most_nodes(leaves) == nodes);
}

TEST_CASE("equal parts of a number with that power of two are whole nodes") {
  for (const int64_t leaves : {8, 16, 24, 32, 48, 56, 64, 96}) {
    for (int64_t parts = 1; leaves % parts == 0; parts *= 2) {
      const int64_t size = leaves / parts;
      for (int64_t p = 0; p < parts; ++p) CHECK(cover(leaves, {p * size, (p + 1) * size}).size() == 1);
    }
  }
}

TEST_CASE("buffers in use: one, or the logarithm of the leaves; one more if a leaf needs its own") {
  const std::map<int64_t, int> addable{{1, 1}, {2, 1}, {4, 2}, {8, 3}, {16, 4}, {32, 5}};
  for (const auto& [leaves, buffers] : addable) CHECK(buffers_of(leaves, LeafKind::kAddable) == buffers);
  const std::map<int64_t, int> own{{1, 1}, {2, 2}, {4, 3}, {8, 4}, {16, 5}, {32, 6}};
  for (const auto& [leaves, buffers] : own) CHECK(buffers_of(leaves, LeafKind::kOwnBuffer) == buffers);
  CHECK(buffers_of(3, LeafKind::kAddable) == 1);
}

TEST_CASE("a plan refuses runs that are not all leaves in order") {
  const auto plan = [](const Nodes& runs) { return message_of(ErrorKind::kFault, [&] { TreePlan(8, runs); }); };
  CHECK(contains(plan({{0, 3}, {4, 8}}), "run [4, 8) of leaves follows leaf 3"));
  CHECK(contains(plan({{0, 5}, {4, 8}}), "run [4, 8) of leaves follows leaf 5"));
  CHECK(contains(plan({{4, 8}, {0, 4}}), "run [4, 8) of leaves follows leaf 0"));
  CHECK(contains(plan({{0, 3}, {3, 7}}), "runs of leaves end at 7, not at 8"));
  CHECK(contains(message_of(ErrorKind::kFault, [] { TreePlan(0, {}); }), "a sum of 0 leaves"));
  // 2048 ranks of a leaf each.
  CHECK(contains(message_of(ErrorKind::kFault, [] { TreePlan(2048, choose_runs(2048, 2048)); }), "more than 1024"));
}

TEST_CASE("chosen runs: the load over an ideal one in percent, and nodes per rank") {
  struct Row {
    int ranks;
    int excess;
    double nodes;
  };
  const std::map<int64_t, std::vector<Row>> table{
      {8, {{3, 12, 1.67}, {5, 25, 1.00}, {6, 50, 1.00}, {7, 75, 1.00}}},
      {16, {{3, 12, 1.67}, {5, 25, 1.00}, {6, 12, 1.67}, {7, 31, 1.29}}},
      {24, {{3, 0, 3.00}, {5, 4, 2.40}, {6, 0, 2.33}, {7, 17, 1.57}}},
      {32, {{3, 3, 3.00}, {5, 9, 2.40}, {6, 12, 1.67}, {7, 9, 1.86}}},
      {48, {{3, 0, 3.67}, {5, 4, 2.80}, {6, 0, 3.00}, {7, 2, 2.71}}},
      {56, {{3, 2, 3.00}, {5, 7, 2.40}, {6, 7, 2.33}, {7, 0, 3.14}}},
      {64, {{3, 3, 3.00}, {5, 2, 3.40}, {6, 3, 3.00}, {7, 9, 1.86}}},
  };
  const auto check = [](int64_t leaves, const Row& row) {
    const Nodes runs = choose_runs(leaves, row.ranks);
    int64_t longest = 0;
    for (const Range& run : runs) longest = std::max(longest, run.size());
    const double excess = static_cast<double>(longest * row.ranks) / static_cast<double>(leaves) - 1;
    const double nodes = static_cast<double>(TreePlan(leaves, runs).total_nodes()) / row.ranks;
    INFO(leaves << " leaves on " << row.ranks << " ranks: " << excess << ", " << nodes);
    CHECK(std::abs(100 * excess - row.excess) <= 0.501);  // 12.5 was rounded down
    CHECK(std::abs(nodes - row.nodes) <= 0.005);
  };
  for (const auto& [leaves, rows] : table) {
    for (const Row& row : rows) check(leaves, row);
    for (const int ranks : {1, 2, 4, 8}) check(leaves, {ranks, 0, 1.0});
  }
}

TEST_CASE("chosen runs with fewer leaves than ranks, and the fewest nodes of all divisions") {
  CHECK(choose_runs(2, 4) == Nodes{{0, 1}, {1, 2}, {2, 2}, {2, 2}});
  CHECK(choose_runs(1, 1) == Nodes{{0, 1}});
  for (int64_t leaves = 3; leaves <= 24; ++leaves) {
    const int64_t longest = (leaves + 2) / 3;
    int64_t fewest = 3 * leaves;
    for (int64_t a = 1; a <= longest; ++a) {
      for (int64_t b = 1; b <= longest; ++b) {
        if (leaves - a - b < 1 || leaves - a - b > longest) continue;
        const Nodes runs{{0, a}, {a, a + b}, {a + b, leaves}};
        fewest = std::min(fewest, TreePlan(leaves, runs).total_nodes());
      }
    }
    CHECK(TreePlan(leaves, choose_runs(leaves, 3)).total_nodes() == fewest);
  }
}

}  // namespace invar
