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
  // buffers f32 (program.buffers or more, ...): a node's elements in each row. `program` must outlive this.
  LeafSum(const LeafProgram& program, const Tensor& buffers);

  bool finished() const { return next_ == program_.steps.size(); }
  int64_t leaf() const { return step().leaf; }
  // (1, ...): where this leaf's value goes; with accumulate() it is added to what is there, by one fp32 addition per
  // element.
  Tensor target() const { return buffer(step().buffer); }
  bool accumulate() const { return step().accumulate; }
  void leaf_done(const Stream& stream);

 private:
  const LeafProgram::Step& step() const { return program_.steps[next_]; }
  Tensor buffer(int index) const { return buffers_.rows(index, index + 1); }

  const LeafProgram& program_;
  Tensor buffers_;
  size_t next_ = 0;
};

// nodes f32 (nodes of this rank, A), as LeafSum leaves them in its first rows. counts[r]: elements of the root that
// rank r gets, A in all. out (counts[rank]), f32 or bf16, rounded once; it may lie anywhere in nodes, whose rest stays
// as it is. Staging of 4 · plan.total_nodes() · counts[rank] bytes is taken from `scratch` and given back, none in a
// group of one; a rank puts 4 · (its nodes) · (A - counts[rank]) bytes on the wire, in plan.rounds() calls.
void tree_reduce_scatter(const Stream& stream, Communicator& group, const TreePlan& plan, const Tensor& nodes,
                         std::span<const int64_t> counts, const Tensor& out, Arena& scratch);

// The whole root on every rank: out (A). A tree_reduce_scatter of nearly equal parts and an all_gather in out's dtype.
void tree_all_reduce(const Stream& stream, Communicator& group, const TreePlan& plan, const Tensor& nodes,
                     const Tensor& out, Arena& scratch);

}  // namespace invar
