#include "parallel/kv_gradients.h"

#include "ops/elementwise.h"
#include "parallel/leaf_cut.h"
#include "parallel/tree_collectives.h"

namespace invar {

KvGradients::KvGradients(const SumContext& ctx, const HeadCut& cut, Communicator* ranks, int64_t head_dim,
                         const ops::HeadView* values_out)
    : ctx_(ctx), cut_(cut), ranks_(ranks), head_dim_(head_dim), values_out_(values_out) {
  const LeafCut* const runs = cut.run_sum();
  const int64_t tokens = ctx.region.tokens(), groups = cut.mine().kv_heads.size();
  const int64_t width = groups * (runs != nullptr || values_out == nullptr ? 2 : 1) * head_dim;
  sum_ = ctx.scratch.allocate("d_k, d_v", ctx.activation, {tokens, width});
  before_terms_ = ctx.scratch.mark();
  if (runs == nullptr) return;
  terms_ = ctx.scratch.allocate("d_k, d_v of runs", ctx.activation, {tokens, std::ssize(runs->rows) * width});
}

// The heads of a call, `offset` elements into what a group has.
ops::HeadView KvGradients::place(const HeadCall& call, int64_t offset) const {
  const int64_t groups = cut_.mine().kv_heads.size();
  if (!terms_.defined()) return {sum_, groups, 1, head_dim_, sum_.dim(1) / groups, offset};
  const int64_t group = sum_.dim(1) / groups;
  const int64_t first = call.runs.begin * sum_.dim(1) + call.groups.begin * group + offset;
  const int64_t stride = call.runs.size() > 1 ? sum_.dim(1) : group;
  return {terms_, call.groups.size() * call.runs.size(), 1, head_dim_, stride, first};
}

ops::HeadView KvGradients::values(const HeadCall& call) const {
  const bool apart = values_out_ != nullptr && !terms_.defined();
  return apart ? *values_out_ : place(call, head_dim_);
}

Tensor KvGradients::sum() {
  if (!terms_.defined()) return sum_;
  const auto& [stream, region, scratch, activation, sequence_length] = ctx_;
  const LeafCut& cut = *cut_.run_sum();
  const int64_t leaves = cut.plan.leaves(), first = cut.program.nodes.front().begin;
  const Tensor flat = sum_.view({sum_.numel()});
  const Tensor terms = terms_.view({sum_.dim(0), std::ssize(cut.rows), sum_.dim(1)});
  if (ranks_ == nullptr) {
    ops::tree_sum(stream, node_program(leaves, cut.program.nodes.front(), first), terms, sum_);
  } else if (cut.plan.one_leaf_each()) {
    const Tensor leaf = terms.view({terms.numel()});
    tree_all_reduce(stream, *ranks_, cut.plan, {&leaf, 1}, flat, scratch);
  } else {
    std::vector<Tensor> nodes;
    for (const Range& node : cut.program.nodes) {
      const Tensor of_node = scratch.allocate("sum over runs", DType::kF32, {sum_.dim(0), sum_.dim(1)});
      ops::tree_sum(stream, node_program(leaves, node, first), terms, of_node);
      nodes.push_back(of_node.view({of_node.numel()}));
    }
    tree_all_reduce(stream, *ranks_, cut.plan, nodes, flat, scratch);
  }
  scratch.release(before_terms_);
  terms_ = Tensor();
  if (values_out_ != nullptr) ops::copy_heads(stream, place({}, head_dim_), *values_out_);
  return sum_;
}

}  // namespace invar
