#include "parallel/mappings.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "parallel/unit_partition.h"

namespace invar {

void TensorRegion::set_tokens(int64_t tokens) {
  if (tokens == tokens_) return;
  tokens_ = tokens;
  slices_.clear();
  if (!sequence_) {
    slices_.push_back({0, tokens});
    return;
  }
  const int64_t any = tokens % group_.size() == 0 ? 1 : kTokenBlock;
  const int64_t block = token_block_ > 0 ? token_block_ : any;
  for (const Range& blocks : split_units(ceil_div(tokens, block), group_.size())) {
    slices_.push_back({std::min(tokens, blocks.begin * block), std::min(tokens, blocks.end * block)});
  }
}

std::vector<int64_t> TensorRegion::counts(int64_t columns) const {
  std::vector<int64_t> counts;
  for (const Range& slice : slices_) counts.push_back(slice.size() * columns);
  return counts;
}

Tensor TensorRegion::gather(const Stream& stream, Arena& arena, const Tensor& local) const {
  INVAR_CHECK(local.dim(0) == local_tokens().size(), "{} is not this rank's {} tokens", local.describe(),
              local_tokens().size());
  if (!gathers()) return local;
  const Tensor all = arena.allocate("gathered", local.dtype(), {tokens_, local.dim(1)});
  group_.all_gather(stream, local, all, counts(local.dim(1)));
  return all;
}

Tensor TensorRegion::reduce(const Stream& stream, Arena& scratch, const Tensor& partial, DType dtype) const {
  INVAR_CHECK(partial.dim(0) == tokens_, "{} is not {} tokens", partial.describe(), tokens_);
  Tensor sum = partial;
  if (group_.size() > 1) {
    if (sequence_) {
      sum = partial.rows(local_tokens().begin, local_tokens().end);
      group_.reduce_scatter(stream, partial, sum, counts(partial.dim(1)), ReduceOp::kSum);
    } else {
      group_.all_reduce(stream, partial, ReduceOp::kSum);
    }
  }
  if (sum.dtype() == dtype) return sum;
  const Tensor rounded = scratch.allocate("reduced", dtype, {sum.dim(0), sum.dim(1)});
  ops::copy(stream, sum, rounded);
  return rounded;
}

}  // namespace invar
