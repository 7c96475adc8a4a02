#include "parallel/reduction_tree.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/integer.h"

namespace invar {
namespace {

bool within(Range inner, Range outer) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

// Whether [left.begin, right.end) is a node whose children these are.
bool are_siblings(int64_t leaves, Range left, Range right) {
  Range node{0, leaves};
  while (node.size() > 1) {
    const Children parts = children(node);
    if (parts.left == left && parts.right == right) return true;
    if (within({left.begin, right.end}, parts.left)) {
      node = parts.left;
    } else if (within({left.begin, right.end}, parts.right)) {
      node = parts.right;
    } else {
      return false;
    }
  }
  return false;
}

void add_cover(Range node, Range run, std::vector<Range>* nodes) {
  if (intersect(node, run).empty()) return;
  if (within(node, run)) {
    nodes->push_back(node);
    return;
  }
  const Children parts = children(node);
  add_cover(parts.left, run, nodes);
  add_cover(parts.right, run, nodes);
}

}  // namespace

Children children(Range node) {
  INVAR_CHECK(node.size() > 1, "node [{}, {}) has no children", node.begin, node.end);
  const int64_t middle = node.begin + ceil_div(node.size(), 2);
  return {{node.begin, middle}, {middle, node.end}};
}

std::vector<Range> cover(int64_t leaves, Range run) {
  INVAR_CHECK(run.empty() || within(run, {0, leaves}), "leaves [{}, {}) of {}", run.begin, run.end, leaves);
  std::vector<Range> nodes;
  if (!run.empty()) add_cover({0, leaves}, run, &nodes);
  return nodes;
}

bool NodeStack::joins_last(Range node) const {
  return !nodes_.empty() && are_siblings(leaves_, nodes_.back(), node);
}

int NodeStack::push(Range node) {
  int joins = 0;
  for (; joins_last(node); ++joins) {
    node.begin = nodes_.back().begin;
    nodes_.pop_back();
  }
  nodes_.push_back(node);
  return joins;
}

LeafProgram leaf_program(int64_t leaves, Range run, LeafKind kind) {
  INVAR_CHECK(run.empty() || within(run, {0, leaves}), "leaves [{}, {}) of {}", run.begin, run.end, leaves);
  LeafProgram program;
  NodeStack stack(leaves);
  for (int64_t i = run.begin; i < run.end; ++i) {
    const Range leaf{i, i + 1};
    LeafProgram::Step step{.leaf = i, .buffer = static_cast<int>(stack.nodes().size())};
    step.accumulate = kind == LeafKind::kAddable && stack.joins_last(leaf);
    step.joins = stack.push(leaf);
    if (step.accumulate) {
      --step.buffer;
      --step.joins;
    }
    program.buffers = std::max(program.buffers, step.buffer + 1);
    program.steps.push_back(step);
  }
  program.nodes = stack.nodes();
  return program;
}

ops::SumProgram node_program(int64_t leaves, Range node, int64_t first) {
  ops::SumProgram program;
  NodeStack stack(leaves);
  for (int64_t leaf = node.begin; leaf < node.end; ++leaf) program.add_term(leaf - first, stack.push({leaf, leaf + 1}));
  return program;
}

TreePlan::TreePlan(int64_t leaves, std::span<const Range> runs) : leaves_(leaves) {
  INVAR_CHECK(leaves >= 1, "a sum of {} leaves", leaves);
  int64_t end = 0;
  size_t rounds = 0;
  for (const Range& run : runs) {
    INVAR_CHECK(run.begin == end && run.end >= end, "run [{}, {}) of leaves follows leaf {}", run.begin, run.end, end);
    end = run.end;
    nodes_.push_back(cover(leaves, run));
    rounds = std::max(rounds, nodes_.back().size());
  }
  INVAR_CHECK(end == leaves, "runs of leaves end at {}, not at {}", end, leaves);

  std::vector<std::vector<int64_t>> row(nodes_.size());
  int64_t rows = 0;
  for (size_t k = 0; k < rounds; ++k) {
    round_begins_.push_back(rows);
    for (size_t r = 0; r < nodes_.size(); ++r) {
      if (k < nodes_[r].size()) row[r].push_back(rows++);
    }
  }
  round_begins_.push_back(rows);

  NodeStack stack(leaves);
  for (size_t r = 0; r < nodes_.size(); ++r) {
    for (size_t k = 0; k < nodes_[r].size(); ++k) program_.add_term(row[r][k], stack.push(nodes_[r][k]));
  }
}

Range TreePlan::rows_of_round(int round) const {
  const auto k = static_cast<size_t>(round);
  return {round_begins_[k], round_begins_[k + 1]};
}

std::vector<Range> choose_runs(int64_t leaves, int ranks) {
  INVAR_CHECK(leaves >= 1 && ranks >= 1, "{} leaves for {} ranks", leaves, ranks);
  constexpr int64_t kImpossible = std::numeric_limits<int64_t>::max();
  const int64_t longest = ceil_div(leaves, ranks);
  const int64_t shortest = ranks > leaves ? 0 : 1;
  const auto at = [&](int64_t rank, int64_t begin) { return static_cast<size_t>(rank * (leaves + 1) + begin); };
  // Of ranks `rank` and on, if their leaves begin at `begin`.
  std::vector<int64_t> fewest(at(ranks, leaves) + 1, kImpossible);
  std::vector<int64_t> size(fewest.size(), 0);
  fewest[at(ranks, leaves)] = 0;

  std::vector<int64_t> nodes(static_cast<size_t>(leaves * (longest + 1)));  // of a run: begin, size
  for (int64_t begin = 0; begin < leaves; ++begin) {
    for (int64_t n = 0; n <= std::min(longest, leaves - begin); ++n) {
      nodes[static_cast<size_t>(begin * (longest + 1) + n)] = std::ssize(cover(leaves, {begin, begin + n}));
    }
  }
  for (int64_t rank = ranks - 1; rank >= 0; --rank) {
    for (int64_t begin = 0; begin <= leaves; ++begin) {
      for (int64_t n = shortest; n <= std::min(longest, leaves - begin); ++n) {
        const int64_t rest = fewest[at(rank + 1, begin + n)];
        if (rest == kImpossible) continue;
        const int64_t own = begin < leaves ? nodes[static_cast<size_t>(begin * (longest + 1) + n)] : 0;
        if (own + rest > fewest[at(rank, begin)]) continue;
        fewest[at(rank, begin)] = own + rest;
        size[at(rank, begin)] = n;
      }
    }
  }
  std::vector<Range> runs;
  int64_t begin = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    runs.push_back({begin, begin + size[at(rank, begin)]});
    begin = runs.back().end;
  }
  return runs;
}

}  // namespace invar
