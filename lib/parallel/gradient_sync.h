#pragma once

#include <span>
#include <vector>

#include "device/device.h"
#include "parallel/parameter.h"
#include "parallel/topology.h"
#include "parallel/worker_order.h"

namespace invar {

// Who owns which rows of the flat buffers among the ranks that hold the same shards (ZeRO-1). The buffers are cut into
// buckets of whole weights; each bucket is cut, at row boundaries, into one nearly equal contiguous piece per rank.
// Replicated weights have buckets of their own, the first ones.
class RowOwnership {
 public:
  // bucket_elements: of the logical tensors, so that all ranks of a tensor-parallel group cut after the same weights,
  // however unequal their shards; a weight with more has a bucket to itself.
  RowOwnership(const ParameterTable& table, int data_size, int64_t bucket_elements);

  struct Bucket {
    Range elements;
    std::vector<int64_t> counts;  // elements that each data rank owns, in rank order
    Range owned(int data_rank) const;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  size_t bucket_of(WeightId id) const { return bucket_of_[static_cast<size_t>(id)]; }

  // A run of rows of one weight that a data rank owns.
  struct Piece {
    WeightId weight;
    Range elements;  // in the flat buffers
    size_t bucket;
  };
  std::vector<Piece> pieces(int data_rank) const;

 private:
  const ParameterTable& table_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // by weight
};

// Completes the gradients of a step and hands out its new values. Gradients are summed a bucket at a time: partial ones
// over the replicas that hold the same rows inside a tensor-parallel group, then all over the data-parallel ranks, on a
// queue beside the backward pass where the device has several. New values travel on that queue too, beside the update
// of the buckets that follow and the next forward pass.
class GradientSync {
 public:
  // `order`: of the sums over data-parallel ranks; null: any. In fixed order `staging` is where others' terms arrive.
  // Collective over the world. Error{kConfig}: copies of rows that sums in any order would let drift apart.
  GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
               const Stream& stream, const WorkerOrder* order, Arena& staging);

  // The micro-batch that follows is the step's last: a bucket is summed as soon as its gradients are there.
  void begin_last_micro_batch();
  // A layer has added its part of the weight's gradient (Weight::users).
  void gradient_done(WeightId id);
  // Sums what is left. Afterwards a rank's own pieces are complete; the rest of the buffer is undefined.
  void finish();
  // Every rank's new values of a bucket to the others of its data-parallel group.
  void publish(size_t bucket);
  // What is queued from now on finds the new values of this weight, or of all.
  void await_values(WeightId id);
  void await_values() const;

 private:
  // Rows that all ranks of a group hold.
  struct Copies {
    Communicator* group;
    Range elements;
  };
  struct BucketState {
    std::vector<Copies> partial;  // terms of a sum over the group
    std::vector<Copies> equal;    // which a sum over data ranks may round differently in each rank of the group
    int users = 0;                // of its weights
    int missing = 0;              // of them in the last micro-batch
    bool summed = false;
    StreamMark published;
    bool awaited = true;
  };
  void add_copies(std::vector<Copies> BucketState::*kind, Communicator* group, Range elements);
  void refuse_unequal_cuts(Communicator& world) const;
  Range own_part(size_t bucket, Range elements) const;
  void sum(size_t bucket);
  void sum_in_order(size_t bucket);
  void sum_nodes(Range elements, std::span<const int64_t> counts);
  void make_copies_equal();

  const ParameterTable& table_;
  const RowOwnership& ownership_;
  Communicator& data_;
  const Stream& stream_;
  Stream queue_;
  const WorkerOrder* order_;
  Arena& staging_;
  std::vector<BucketState> buckets_;
  bool last_micro_batch_ = false;
};

}  // namespace invar
