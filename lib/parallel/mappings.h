#pragma once

#include <optional>
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
  TensorRegion(Communicator& group, bool sequence_parallel) : group_(group), sequence_(sequence_parallel) {}

  // T of the micro-batches that follow; slices are equal where T divides, else whole blocks of kTokenBlock tokens.
  void set_tokens(int64_t tokens);
  int64_t tokens() const { return tokens_; }
  Range local_tokens() const { return slices_[static_cast<size_t>(sequence_ ? group_.rank() : 0)]; }
  Communicator& group() const { return group_; }
  bool sequence_parallel() const { return sequence_; }

  // Partial sums are exchanged in fp32; a group of one needs none.
  DType partial_dtype(DType activation) const { return group_.size() == 1 ? activation : DType::kF32; }

  // (local, C) -> (T, C). The result is in scratch, or `local` itself.
  Tensor gather(const Stream& stream, Arena& scratch, const Tensor& local) const;
  // (T, C) terms of a sum over the group -> (local, C) of dtype, rounded once. `partial` is overwritten; the result is
  // in scratch, or a part of `partial`.
  Tensor reduce(const Stream& stream, Arena& scratch, const Tensor& partial, DType dtype) const;

  // The same beside what is queued on the stream next, where its device has several queues: the result is there, and
  // what was given may be used again, for what is queued after join().
  Tensor gather_beside(const Stream& stream, Arena& scratch, const Tensor& local) const;
  Tensor reduce_beside(const Stream& stream, Arena& scratch, const Tensor& partial, DType dtype) const;
  void join(const Stream& stream) const;
  // Makes the queue for them; before that they run on the stream itself.
  void open_queue(const Stream& stream);

  static constexpr int64_t kTokenBlock = 8;

 private:
  std::vector<int64_t> counts(int64_t columns) const;
  const Stream& queue_after(const Stream& stream) const;

  Communicator& group_;
  bool sequence_;
  std::optional<Stream> queue_;
  int64_t tokens_ = 0;
  std::vector<Range> slices_;
};

}  // namespace invar
