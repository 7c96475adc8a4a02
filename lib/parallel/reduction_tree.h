#pragma once

#include <span>
#include <vector>

#include "core/range.h"
#include "ops/tree_sum.h"

namespace invar {

// The fixed tree by which a sum is evaluated whose terms may be spread over ranks. Its leaves are terms 0 to leaves - 1
// of the sum; a node is the sum of a half-open range of leaves. A node [a, b) of more than one leaf is one fp32
// addition of its children [a, m) and [m, b), m = a + ceil((b - a) / 2); the root is [0, leaves). So every node has one
// value, whoever computes it, and the root has the same bits for any division of the leaves into contiguous runs.
struct Children {
  Range left;
  Range right;
};
// Of a node of two leaves or more.
Children children(Range node);

// The fewest nodes whose leaves are those of `run`, left to right: what a rank that holds the run can compute by
// itself. One node if the run is a whole node, else at most 2 log2(leaves) - 2, for powers of two.
std::vector<Range> cover(int64_t leaves, Range run);

// Nodes that are complete, left to right, where neighbours that are siblings become their parent: a binary counter.
class NodeStack {
 public:
  explicit NodeStack(int64_t leaves) : leaves_(leaves) {}

  // Puts a node at the right end. Returns how many additions follow, each of the two last nodes.
  int push(Range node);
  const std::vector<Range>& nodes() const { return nodes_; }
  // Whether a node would be added at once to the last one.
  bool joins_last(Range node) const;

 private:
  int64_t leaves_;
  std::vector<Range> nodes_;
};

// How a leaf's value comes to be: as a product that can be added in place (beta = 1, one fp32 addition of the finished
// leaf), or as a sum of several that needs a buffer of its own until it is finished.
enum class LeafKind : uint8_t { kAddable, kOwnBuffer };

// How a rank evaluates its nodes from its leaves, one after another. Buffers are a stack: after the last leaf, buffer k
// holds node k of the cover.
struct LeafProgram {
  struct Step {
    int64_t leaf = 0;
    int buffer = 0;           // where the leaf's value goes
    bool accumulate = false;  // it is added to what is there
    int joins = 0;            // then: buffer - 1 += buffer, buffer - 2 += buffer - 1, ...
  };
  std::vector<Step> steps;   // one per leaf, ascending
  std::vector<Range> nodes;  // cover(leaves, run)
  // In use at once, at most. For a node of 2^k leaves: max(1, k) if they are addable, else k + 1.
  int buffers = 0;
};
LeafProgram leaf_program(int64_t leaves, Range run, LeafKind kind);

// A node as a sum of its leaves, of which leaf `first` lies in row 0, the next one in row 1, ...
ops::SumProgram node_program(int64_t leaves, Range node, int64_t first);

// Who has which nodes of a sum, and how the root comes of them. Every rank computes it for itself. runs[r]: the leaves
// of rank r. Error{kFault} if they are not [0, leaves) cut in ascending order (runs may be empty).
class TreePlan {
 public:
  TreePlan(int64_t leaves, std::span<const Range> runs);

  int ranks() const { return static_cast<int>(nodes_.size()); }
  int64_t leaves() const { return leaves_; }
  // Nodes of a rank, in the order of its buffers.
  const std::vector<Range>& nodes(int rank) const { return nodes_[static_cast<size_t>(rank)]; }
  int64_t total_nodes() const { return program_.terms; }
  // So that nodes have no more digits than leaves.
  bool one_leaf_each() const { return leaves_ == ranks() && total_nodes() == leaves_ && rounds() == 1; }

  // Nodes travel in rounds: in round k every rank that has a node k gives it. Where they arrive, rows begin with the
  // nodes of round 0 in rank order.
  int rounds() const { return static_cast<int>(round_begins_.size()) - 1; }
  Range rows_of_round(int round) const;
  // The root as a sum of these rows.
  const ops::SumProgram& program() const { return program_; }

 private:
  int64_t leaves_;
  std::vector<std::vector<Range>> nodes_;
  std::vector<int64_t> round_begins_;
  ops::SumProgram program_;
};

// Contiguous runs of leaves for `ranks` ranks: of all divisions with the least largest run, and no empty run unless
// there are fewer leaves than ranks, one with the fewest nodes; among these the one with the longest first run, and so
// on.
std::vector<Range> choose_runs(int64_t leaves, int ranks);

}  // namespace invar
