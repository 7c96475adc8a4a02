#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/exact_sum.h"
#include "core/tensor.h"
#include "device/stream.h"

namespace invar {

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

// One rank's end of a message.
struct Message {
  Tensor buffer;
  int peer = 0;
};

// A group of ranks and the collectives among them. Nothing above this folder knows which library moves the bytes.
//
// Every rank of the group calls the same collectives in the same order with matching sizes. Tensors are contiguous; an
// empty one is legal everywhere. In a group of one each call is a copy or nothing. Supported dtypes: all for moving
// bytes; f32, bf16, f64, i32, i64 for reductions (bf16 adds in fp32 and rounds each sum; integers wrap around; a
// maximum or minimum keeps a NaN, unless NCCL makes it). Reductions give every rank the same bits. A kMeta tensor moves
// nothing on any communicator.
//
// Errors: Error{kFault} that names operation, group and sizes. A rank that fails makes the others' calls fail or end
// within seconds; no call waits for ever for a dead rank.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // The rank that the launcher knows a rank of this group by. Messages name ranks so, whatever the group.
  int job_rank(int rank) const { return job_ranks_.empty() ? rank : job_ranks_[static_cast<size_t>(rank)]; }
  const std::vector<int>& job_ranks() const { return job_ranks_; }  // empty: the group is the whole job
  // For messages: "world", "tensor", "data".
  const std::string& name() const { return name_; }
  // Whether sums of several elements add in ascending rank order: then a sum depends on its terms alone, not on counts,
  // sizes or where the ranks are. NCCL's do not.
  virtual bool adds_in_rank_order() const { return true; }

  // Collective over this group: ranks of equal color form a new group, ordered by (key, old rank). A negative color
  // gives null.
  virtual std::unique_ptr<Communicator> split(int color, int key, std::string name) = 0;

  // In place.
  virtual void all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) = 0;
  // counts[r]: elements that rank r gives; receive holds them one after another. send may lie at its own place inside
  // receive.
  virtual void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                          std::span<const int64_t> counts) = 0;
  // counts[r]: elements of the sum that rank r gets; send holds all of them. receive may lie at its own place inside
  // send; the rest of send is then undefined.
  virtual void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive,
                              std::span<const int64_t> counts, ReduceOp op) = 0;
  // send holds send_counts[r] elements for each rank r in order; receive gets receive_counts[r] from each. The two do
  // not overlap.
  virtual void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts,
                          const Tensor& receive, std::span<const int64_t> receive_counts) = 0;
  // Any messages among the ranks, all at once and of one dtype, where all_to_all would want them packed: those between
  // two ranks in the order given. Peers are others. A collective like the rest: a rank without messages calls it too.
  virtual void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) = 0;
  virtual void broadcast(const Stream& stream, const Tensor& buffer, int root) = 0;
  // To and from another rank of the group. A send may wait until its message is received.
  virtual void send(const Stream& stream, const Tensor& buffer, int to) = 0;
  virtual void receive(const Stream& stream, const Tensor& buffer, int from) = 0;
  virtual void barrier() = 0;

 protected:
  Communicator(int rank, int size, std::string name, std::vector<int> job_ranks = {})
      : rank_(rank), size_(size), name_(std::move(name)), job_ranks_(std::move(job_ranks)) {}

 private:
  int rank_;
  int size_;
  std::string name_;
  std::vector<int> job_ranks_;
};

// Host scalars, for counts and norms.
int64_t all_reduce_value(Communicator& communicator, int64_t value, ReduceOp op);
double all_reduce_value(Communicator& communicator, double value, ReduceOp op);
// The terms of all ranks, rounded once.
double all_reduce_value(Communicator& communicator, const ExactSum& sum);

// counts for `size` equal parts of `count` elements each.
std::vector<int64_t> equal_counts(int size, int64_t count);

}  // namespace invar
