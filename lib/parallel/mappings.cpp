#include "parallel/mappings.h"

#include <algorithm>

#include "core/integer.h"
#include "device/device.h"
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
  const int64_t block = tokens % group_.size() == 0 ? 1 : kTokenBlock;
  for (const Range& blocks : split_units(ceil_div(tokens, block), group_.size())) {
    slices_.push_back({std::min(tokens, blocks.begin * block), std::min(tokens, blocks.end * block)});
  }
}

std::vector<int64_t> TensorRegion::counts(int64_t columns) const {
  std::vector<int64_t> counts;
  for (const Range& slice : slices_) counts.push_back(slice.size() * columns);
  return counts;
}

Tensor TensorRegion::gather(const Stream& stream, Arena& scratch, const Tensor& local) const {
  INVAR_CHECK(local.dim(0) == local_tokens().size(), "{} is not this rank's {} tokens", local.describe(),
              local_tokens().size());
  if (!sequence_ || group_.size() == 1) return local;
  const Tensor all = scratch.allocate("gathered", local.dtype(), {tokens_, local.dim(1)});
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

void TensorRegion::open_queue(const Stream& stream) {
  if (group_.size() > 1) queue_ = queue_beside(stream);
}

const Stream& TensorRegion::queue_after(const Stream& stream) const {
  if (!queue_) return stream;
  wait_for(*queue_, stream);
  return *queue_;
}

Tensor TensorRegion::gather_beside(const Stream& stream, Arena& scratch, const Tensor& local) const {
  return gather(queue_after(stream), scratch, local);
}

Tensor TensorRegion::reduce_beside(const Stream& stream, Arena& scratch, const Tensor& partial, DType dtype) const {
  return reduce(queue_after(stream), scratch, partial, dtype);
}

void TensorRegion::join(const Stream& stream) const {
  if (queue_) wait_for(stream, *queue_);
}

}  // namespace invar
