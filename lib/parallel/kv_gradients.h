#pragma once

#include "parallel/head_cut.h"
#include "parallel/sum_context.h"

namespace invar {

// The gradients of the keys and values of an attention layer: each call of attention leaves its own, which sum() adds
// up, over the ranks that hold copies of the heads too where the cut says so (HeadCut::run_sum).
class KvGradients {
 public:
  // On ctx.scratch. ranks: that hold copies of the heads, or null. values_out: where the gradient of the values goes
  // (heads as in attention); undefined: beside that of the keys.
  KvGradients(const SumContext& ctx, const HeadCut& cut, Communicator* ranks, int64_t head_dim,
              const ops::HeadView* values_out);

  // Where a call writes, every element.
  ops::HeadView keys(const HeadCall& call) const { return place(call, 0); }
  ops::HeadView values(const HeadCall& call) const;
  // (T, C): for each KV head of this rank the gradient of its keys and, if they are beside, of its values. Collective
  // over `ranks`.
  Tensor sum();

 private:
  ops::HeadView place(const HeadCall& call, int64_t offset) const;

  SumContext ctx_;
  const HeadCut& cut_;
  Communicator* ranks_;
  int64_t head_dim_;
  const ops::HeadView* values_out_;
  Tensor sum_;                // (T, C)
  Tensor terms_;              // (T, runs · C), if runs are summed
  Arena::Mark before_terms_;  // on scratch
};

}  // namespace invar
