#pragma once

#include <span>

#include "comm/communicator.h"
#include "device/arena.h"
#include "parallel/reduction_tree.h"

namespace invar {

// Sums over a group whose bits depend on the leaves alone, not on how many ranks hold them: communicators move bytes,
// the additions are those of the tree (parallel/reduction_tree.h).

// Evaluates a rank's nodes from its leaves. The caller computes the leaves one after another:
//   for (LeafSum sum(program, buffers); !sum.finished(); sum.leaf_done(stream)) { compute sum.leaf() into sum.target()
//   }
class LeafSum {
 public:
  // buffers f32 (of a single leaf f32 or bf16), program.buffers or more of one shape: a node's elements in each.
  // `program` must outlive this.
  LeafSum(const LeafProgram& program, std::vector<Tensor> buffers);

  bool finished() const { return next_ == program_.steps.size(); }
  int64_t leaf() const { return step().leaf; }
  // Where this leaf's value goes; with accumulate() it is added to what is there, by one fp32 addition per element.
  const Tensor& target() const { return buffers_[static_cast<size_t>(step().buffer)]; }
  bool accumulate() const { return step().accumulate; }
  // Puts a leaf, f32 or bf16, that was made elsewhere into target(), or adds it.
  void put(const Stream& stream, const Tensor& leaf) const;
  void leaf_done(const Stream& stream);

 private:
  const LeafProgram::Step& step() const { return program_.steps[next_]; }

  const LeafProgram& program_;
  std::vector<Tensor> buffers_;
  size_t next_ = 0;
};

// Adds the top buffer to the one below, `joins` times: what NodeStack::push() says.
void join_buffers(const Stream& stream, std::span<const Tensor> buffers, int top, int joins);

// A rank's nodes from all its leaves, f32 of one shape, in the order of the program; they are overwritten.
std::vector<Tensor> nodes_of_leaves(const Stream& stream, const LeafProgram& program, std::span<const Tensor> leaves);

// nodes: (A) for each node of this rank, as LeafSum leaves them in its first buffers, f32, or on all ranks bf16 where
// each has one leaf, which has been rounded to it. counts[r]: elements of the root that rank r gets, A in all. out
// (counts[rank]), f32 or bf16, rounded once; it may lie anywhere in nodes, whose rest stays as it is. With b bytes in
// an element of a node, staging of b · plan.total_nodes() · counts[rank] bytes is taken from `scratch` and given back,
// none in a group of one; a rank puts b · (its nodes) · (A - counts[rank]) bytes on the wire, in plan.rounds() calls.
void tree_reduce_scatter(const Stream& stream, Communicator& group, const TreePlan& plan, std::span<const Tensor> nodes,
                         std::span<const int64_t> counts, const Tensor& out, Arena& scratch);

// The whole root on every rank: out (A). A tree_reduce_scatter of nearly equal parts and an all_gather in out's dtype.
void tree_all_reduce(const Stream& stream, Communicator& group, const TreePlan& plan, std::span<const Tensor> nodes,
                     const Tensor& out, Arena& scratch);

}  // namespace invar
