#include "parallel/tree_collectives.h"

#include <algorithm>
#include <numeric>

#include "comm/recording_communicator.h"
#include "comm/thread_communicator.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "tree_values.h"

using namespace invar;
using test::contains;
using test::Elements;
using test::message_of;

namespace {

const Stream kCpu(DeviceType::kCpu);
const Stream kMeta(DeviceType::kMeta);

Tensor matrix(Elements& values, int64_t rows) {
  return Tensor(values.data(), DType::kF32, DeviceType::kCpu, {rows, rows == 0 ? 0 : std::ssize(values) / rows});
}

// Its rows, each a tensor of one dim.
std::vector<Tensor> rows_of(const Tensor& whole) {
  std::vector<Tensor> rows;
  for (int64_t row = 0; row < whole.dim(0); ++row) rows.push_back(whole.rows(row, row + 1).view({whole.dim(1)}));
  return rows;
}

// A rank's nodes, from leaves (G, A), with buffers that nobody filled before.
Elements nodes_of(int64_t leaf_count, Range run, LeafKind kind, const Elements& leaves) {
  const int64_t elements = std::ssize(leaves) / leaf_count;
  const LeafProgram program = leaf_program(leaf_count, run, kind);
  Elements buffers(static_cast<size_t>(program.buffers * elements), std::nanf(""));
  for (LeafSum sum(program, rows_of(matrix(buffers, program.buffers))); !sum.finished(); sum.leaf_done(kCpu)) {
    const Tensor target = sum.target();
    for (int64_t i = 0; i < elements; ++i) {
      const float value = leaves[static_cast<size_t>(sum.leaf() * elements + i)];
      float& out = target.data<float>()[i];
      out = sum.accumulate() ? out + value : value;
    }
  }
  buffers.resize(program.nodes.size() * static_cast<size_t>(elements));
  return buffers;
}

// What a sum over ranks gives that adds its own terms first.
Elements ordinary_sum(const std::vector<Range>& runs, const Elements& leaves, int64_t elements) {
  Elements total;
  for (const Range& run : runs) {
    if (run.empty()) continue;
    Elements own(leaves.begin() + run.begin * elements, leaves.begin() + (run.begin + 1) * elements);
    for (int64_t i = elements; i < run.size() * elements; ++i) {
      own[static_cast<size_t>(i % elements)] += leaves[static_cast<size_t>(run.begin * elements + i)];
    }
    if (total.empty()) {
      total = own;
    } else {
      std::ranges::transform(total, own, total.begin(), std::plus());
    }
  }
  return total;
}

std::vector<int64_t> random_counts(int64_t elements, int ranks, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<int64_t> counts;
  for (const Range& slice : test::random_runs(elements, ranks, generator)) counts.push_back(slice.size());
  return counts;
}

Range slice_of(const std::vector<int64_t>& counts, int rank) {
  const int64_t begin = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
  return {begin, begin + counts[static_cast<size_t>(rank)]};
}

Elements part_of(const Elements& values, Range range) {
  return {values.begin() + range.begin, values.begin() + range.end};
}

}  // namespace

TEST_CASE("4000 random divisions of up to 256 leaves over up to 12 ranks give the bits of one rank") {
  constexpr int64_t kElements = 8;
  std::mt19937 generator(5);
  int64_t wrong = 0, control = 0, compared = 0;
  for (unsigned run = 0; run < 4000; ++run) {
    const auto leaf_count = static_cast<int64_t>(generator() % 256 + 1);
    const auto ranks = static_cast<int>(generator() % 12 + 1);
    const std::vector<Range> runs = test::random_runs(leaf_count, ranks, generator);
    const TreePlan plan(leaf_count, runs);
    const Elements leaves = test::wide_values(leaf_count * kElements, run);
    const Elements expected = test::tree_root(leaves, kElements);
    std::vector<Elements> nodes;
    for (const Range& own : runs) {
      nodes.push_back(nodes_of(leaf_count, own, run % 2 == 0 ? LeafKind::kAddable : LeafKind::kOwnBuffer, leaves));
    }
    wrong += test::different(test::root_of(plan, nodes, kElements), expected);
    control += test::different(ordinary_sum(runs, leaves, kElements), expected);
    compared += kElements;
  }
  CHECK(wrong == 0);
  const double fraction = static_cast<double>(control) / static_cast<double>(compared);
  INFO("an ordinary sum differs in " << fraction);
  CHECK(fraction > 0.6);
}

TEST_CASE("siblings may change places, others may not") {
  constexpr int64_t kLeaves = 8, kElements = 2000;
  const Elements leaves = test::wide_values(kLeaves * kElements, 9);
  const auto root = [&](const std::vector<int64_t>& order) {
    Elements moved;
    for (const int64_t leaf : order) {
      moved.insert(moved.end(), leaves.begin() + leaf * kElements, leaves.begin() + (leaf + 1) * kElements);
    }
    return nodes_of(kLeaves, {0, kLeaves}, LeafKind::kAddable, moved);
  };
  const Elements plain = root({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(test::different(root({1, 0, 2, 3, 4, 5, 6, 7}), plain) == 0);
  CHECK(test::different(root({2, 3, 0, 1, 4, 5, 7, 6}), plain) == 0);
  CHECK(test::different(root({4, 5, 6, 7, 0, 1, 2, 3}), plain) == 0);
  CHECK(test::different(root({0, 2, 1, 3, 4, 5, 6, 7}), plain) > kElements / 8);
  CHECK(test::different(root({0, 1, 2, 4, 3, 5, 6, 7}), plain) > kElements / 8);
}

TEST_CASE("a reduce-scatter over any ranks has the bits of one rank, at any counts") {
  constexpr int64_t kElements = 1000;
  for (const int ranks : {1, 2, 3, 4, 5, 7}) {
    for (const int64_t leaf_count : {1, 8, 24, 37}) {
      const auto seed = static_cast<unsigned>(ranks * 100 + leaf_count);
      std::mt19937 generator(seed);
      const std::vector<Range> random = test::random_runs(leaf_count, ranks, generator);
      const std::vector<int64_t> counts = random_counts(kElements, ranks, seed);
      const Elements leaves = test::wide_values(leaf_count * kElements, seed);
      const Elements expected = test::tree_root(leaves, kElements);
      run_thread_ranks(ranks, [&](Communicator& world) {
        for (const std::vector<Range>& runs : {random, choose_runs(leaf_count, ranks)}) {
          const TreePlan plan(leaf_count, runs);
          const auto rank = static_cast<size_t>(world.rank());
          const int64_t own_nodes = std::ssize(plan.nodes(world.rank()));
          Elements nodes = nodes_of(leaf_count, runs[rank], LeafKind::kAddable, leaves);
          const Tensor given(nodes.data(), DType::kF32, DeviceType::kCpu, {own_nodes, kElements});
          Arena scratch("scratch", DeviceType::kCpu, 1 << 20);
          const Range slice = slice_of(counts, world.rank());
          Elements out(static_cast<size_t>(slice.size()), std::nanf(""));
          tree_reduce_scatter(kCpu, world, plan, rows_of(given), counts, view_of(out), scratch);
          CHECK(test::different(out, part_of(expected, slice)) == 0);

          std::vector<BF16> rounded(out.size());
          tree_reduce_scatter(kCpu, world, plan, rows_of(given), counts, view_of(rounded), scratch);
          int64_t wrong = 0;
          for (size_t i = 0; i < out.size(); ++i) wrong += rounded[i].bits == BF16(out[i]).bits ? 0 : 1;
          CHECK(wrong == 0);
          CHECK(scratch.used() == 0);
          CHECK(
              (ranks == 1 ? scratch.high_water() == 0 : scratch.high_water() >= 4 * plan.total_nodes() * slice.size()));

          if (own_nodes > 0) {  // the result where a node was
            const Tensor place = given.rows(own_nodes - 1, own_nodes).view({kElements}).rows(slice.begin, slice.end);
            tree_reduce_scatter(kCpu, world, plan, rows_of(given), counts, place, scratch);
            CHECK(test::different(Elements(place.data<float>(), place.data<float>() + slice.size()), out) == 0);
          } else {
            tree_reduce_scatter(kCpu, world, plan, rows_of(given), counts, view_of(out), scratch);
          }
        }
      });
    }
  }
}

TEST_CASE("an all-reduce has the same bits on every rank, and at every number of ranks") {
  constexpr int64_t kLeaves = 16, kElements = 1003;
  const Elements leaves = test::wide_values(kLeaves * kElements, 4);
  const Elements expected = test::tree_root(leaves, kElements);
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const std::vector<Range> runs = choose_runs(kLeaves, ranks);
    int64_t control = 0;
    run_thread_ranks(ranks, [&](Communicator& world) {
      const auto rank = static_cast<size_t>(world.rank());
      const TreePlan plan(kLeaves, runs);
      Elements nodes = nodes_of(kLeaves, runs[rank], LeafKind::kAddable, leaves);
      const Tensor given = matrix(nodes, std::ssize(plan.nodes(world.rank())));
      Arena scratch("scratch", DeviceType::kCpu, 1 << 20);
      std::vector<BF16> rounded(kElements);
      tree_all_reduce(kCpu, world, plan, rows_of(given), view_of(rounded), scratch);
      int64_t wrong = 0;
      for (size_t i = 0; i < rounded.size(); ++i) wrong += rounded[i].bits == BF16(expected[i]).bits ? 0 : 1;
      CHECK(wrong == 0);

      Elements ordinary = ordinary_sum({runs[rank]}, leaves, kElements);
      world.all_reduce(kCpu, view_of(ordinary), ReduceOp::kSum);
      if (rank == 0) control = test::different(ordinary, expected);

      const Tensor in_place = given.rows(0, 1).view({kElements});
      tree_all_reduce(kCpu, world, plan, rows_of(given), in_place, scratch);
      CHECK(test::different(Elements(nodes.begin(), nodes.begin() + kElements), expected) == 0);
    });
    INFO(ranks << " ranks: an ordinary sum differs in " << control);
    CHECK(control > kElements / 3);
  }
}

TEST_CASE("rounded leaves travel as such and give the bits of one rank") {
  constexpr int64_t kElements = 1000;
  for (const auto& [leaf_count, runs] :
       {std::pair<int64_t, std::vector<Range>>{2, {{0, 1}, {1, 2}}}, {5, choose_runs(5, 5)}, {8, choose_runs(8, 8)}}) {
    const auto ranks = static_cast<int>(runs.size());
    const TreePlan plan(leaf_count, runs);
    REQUIRE(plan.one_leaf_each());
    Elements leaves = test::wide_values(leaf_count * kElements, 7);
    std::vector<BF16> rounded(leaves.begin(), leaves.end());
    const Elements exact = test::tree_root(leaves, kElements);
    for (size_t i = 0; i < leaves.size(); ++i) leaves[i] = static_cast<float>(rounded[i]);
    const Elements expected = test::tree_root(leaves, kElements);
    CHECK(test::different(expected, exact) > kElements / 2);
    if (leaf_count > 2) CHECK(test::different(ordinary_sum(runs, leaves, kElements), expected) > 10);  // of few digits
    const std::vector<int64_t> counts = random_counts(kElements, ranks, 3);
    run_thread_ranks(ranks, [&](Communicator& world) {
      const Range run = runs[static_cast<size_t>(world.rank())];
      const Tensor all(rounded.data(), DType::kBF16, DeviceType::kCpu, {leaf_count, kElements});
      const std::vector<Tensor> nodes = rows_of(all.rows(run.begin, run.end));
      Arena scratch("scratch", DeviceType::kCpu, 1 << 20);
      const Range slice = slice_of(counts, world.rank());
      Elements out(static_cast<size_t>(slice.size()), std::nanf(""));
      tree_reduce_scatter(kCpu, world, plan, nodes, counts, view_of(out), scratch);
      CHECK(test::different(out, part_of(expected, slice)) == 0);
      Elements root(kElements, std::nanf(""));
      tree_all_reduce(kCpu, world, plan, nodes, view_of(root), scratch);
      CHECK(test::different(root, expected) == 0);
    });
  }
}

TEST_CASE("on meta nothing moves, and staging and bytes on the wire are counted") {
  constexpr int64_t kElements = 1024;
  const TreePlan plan(8, std::vector<Range>{{0, 3}, {3, 6}, {6, 8}});
  const std::vector<int64_t> counts{512, 256, 256};
  for (const int rank : {0, 1, 2}) {
    TrafficTable table;
    const auto group = make_recording_communicator(rank, 3, "tensor", &table);
    Arena scratch("scratch", DeviceType::kMeta, 0);
    const int64_t own_nodes = std::ssize(plan.nodes(rank));
    const int64_t own = counts[static_cast<size_t>(rank)];
    const Tensor nodes(nullptr, DType::kF32, DeviceType::kMeta, {own_nodes, kElements});
    tree_reduce_scatter(kMeta, *group, plan, rows_of(nodes), counts,
                        Tensor(nullptr, DType::kF32, DeviceType::kMeta, {own}), scratch);
    CHECK(table["tensor all_to_all"].calls == 2);
    CHECK(table["tensor all_to_all"].bytes == 4 * own_nodes * (kElements - own));
    CHECK(scratch.high_water() == 4 * 5 * own);
    CHECK(scratch.used() == 0);
    tree_all_reduce(kMeta, *group, plan, rows_of(nodes), Tensor(nullptr, DType::kBF16, DeviceType::kMeta, {kElements}),
                    scratch);
    CHECK(table["tensor all_gather"].calls == 1);
    CHECK(table["tensor all_gather"].bytes > 0);
    CHECK(table.size() == 2);
  }
  TrafficTable table;  // rounded leaves take half the bytes
  const auto group = make_recording_communicator(1, 3, "tensor", &table);
  Arena scratch("scratch", DeviceType::kMeta, 0);
  const Tensor leaf(nullptr, DType::kBF16, DeviceType::kMeta, {1, kElements});
  tree_reduce_scatter(kMeta, *group, TreePlan(3, choose_runs(3, 3)), rows_of(leaf), counts,
                      Tensor(nullptr, DType::kBF16, DeviceType::kMeta, {256}), scratch);
  CHECK(table["tensor all_to_all"].bytes == 2 * (kElements - 256));
  CHECK(scratch.high_water() == 2 * 3 * 256);
}

TEST_CASE("operands that do not fit the plan are refused") {
  const TreePlan plan(8, std::vector<Range>{{0, 8}});
  run_thread_ranks(1, [&](Communicator& world) {
    Elements values(8);
    Arena scratch("scratch", DeviceType::kCpu, 1 << 10);
    const std::vector<int64_t> counts{8}, wrong_counts{7};
    const auto refused = [&](const TreePlan& tree, const Tensor& nodes, const std::vector<int64_t>& by_rank) {
      return message_of(ErrorKind::kFault, [&] {
        tree_reduce_scatter(kCpu, world, tree, rows_of(nodes), by_rank, view_of(values).rows(0, 8), scratch);
      });
    };
    CHECK(contains(refused(TreePlan(8, std::vector<Range>{{0, 8}, {8, 8}}), matrix(values, 1), counts),
                   "a tree over 2 ranks and 1 counts, in group 'world' of 1"));
    CHECK(contains(refused(plan, matrix(values, 2), counts), "2 nodes of 1"));
    CHECK(contains(refused(plan, matrix(values, 1), wrong_counts), "a node is f32 (8), not f32 of 7 elements"));
    std::vector<BF16> rounded(8);
    const Tensor sums(rounded.data(), DType::kBF16, DeviceType::kCpu, {1, 8});
    CHECK(contains(refused(plan, sums, counts), "bf16 nodes of 8 leaves on 1 ranks"));
  });
  const LeafProgram program = leaf_program(8, {0, 8}, LeafKind::kAddable);
  Elements two(16);
  CHECK(contains(message_of(ErrorKind::kFault, [&] { LeafSum(program, rows_of(matrix(two, 2))); }), "2 buffers of 3"));
}
