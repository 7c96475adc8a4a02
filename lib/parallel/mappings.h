#pragma once

#include <vector>

#include "comm/communicator.h"
#include "core/range.h"
#include "device/arena.h"

namespace invar {

// The border of a tensor-parallel region. Outside, activations are (local tokens, C): under sequence parallelism a
// contiguous slice of the flat token dim, else all tokens. Inside, every rank sees all T tokens and a part of the
// features. Backward crosses the same border with gather and reduce exchanged. Both are the identity in a group of one.
class TensorRegion {
 public:
  // token_block: tokens that stay together (SumPolicy::token_block); 0: any. reduce_dtype: of partial sums that are
  // exchanged.
  TensorRegion(Communicator& group, bool sequence_parallel, int64_t token_block = 0, DType reduce_dtype = DType::kF32)
      : group_(group), sequence_(sequence_parallel), token_block_(token_block), reduce_dtype_(reduce_dtype) {}

  // T of the micro-batches that follow. Slices are whole token blocks; without them equal where T divides, else whole
  // blocks of kTokenBlock tokens.
  void set_tokens(int64_t tokens);
  int64_t token_block() const { return token_block_; }
  int64_t tokens() const { return tokens_; }
  // Tokens of each rank outside; without sequence parallelism one slice, all of them.
  const std::vector<Range>& slices() const { return slices_; }
  Range local_tokens() const { return slices_[static_cast<size_t>(sequence_ ? group_.rank() : 0)]; }
  Communicator& group() const { return group_; }
  bool sequence_parallel() const { return sequence_; }

  DType reduce_dtype() const { return reduce_dtype_; }
  // A group of one exchanges nothing.
  DType partial_dtype(DType activation) const { return group_.size() == 1 ? activation : reduce_dtype_; }

  // Whether gather() gives more than `local`.
  bool gathers() const { return sequence_ && group_.size() > 1; }
  // (local, C) -> (T, C). The result is in the arena, or `local` itself.
  Tensor gather(const Stream& stream, Arena& arena, const Tensor& local) const;
  // (T, C) terms of a sum over the group -> (local, C) of dtype, rounded once if the terms are f32. `partial` is
  // overwritten; the result is in scratch, or a part of `partial`.
  Tensor reduce(const Stream& stream, Arena& scratch, const Tensor& partial, DType dtype) const;
  // Elements of each rank's local tokens, of `columns` columns.
  std::vector<int64_t> counts(int64_t columns) const;

  static constexpr int64_t kTokenBlock = 8;

 private:
  Communicator& group_;
  bool sequence_;
  int64_t token_block_;
  DType reduce_dtype_;
  int64_t tokens_ = 0;
  std::vector<Range> slices_;
};

}  // namespace invar
