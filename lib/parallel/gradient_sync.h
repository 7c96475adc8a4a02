#pragma once

#include <vector>

#include "parallel/parameter.h"
#include "parallel/topology.h"

namespace invar {

// Who owns which rows of the flat buffers among the ranks that hold the same shards (ZeRO-1). The buffers are cut into
// buckets of whole weights; each bucket is cut, at row boundaries, into one nearly equal contiguous piece per rank.
class RowOwnership {
 public:
  RowOwnership(const ParameterTable& table, int data_size, int64_t bucket_elements = kBucketElements);

  struct Bucket {
    Range elements;
    std::vector<int64_t> counts;  // elements that each data rank owns, in rank order
    Range owned(int data_rank) const;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // A run of rows of one weight that a data rank owns.
  struct Piece {
    WeightId weight;
    Range elements;  // in the flat buffers
  };
  std::vector<Piece> pieces(int data_rank) const;

  static constexpr int64_t kBucketElements = 32 << 20;

 private:
  const ParameterTable& table_;
  std::vector<Bucket> buckets_;
};

// Completes the gradients of a step and hands out its new values. Gradients are summed a bucket at a time: partial ones
// over the replicas that hold the same rows inside a tensor-parallel group, then all over the data-parallel ranks, on a
// queue beside the backward pass where the device has several.
class GradientSync {
 public:
  GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
               const Stream& stream);

  // The micro-batch that follows is the step's last: a bucket is summed as soon as its gradients are there.
  void begin_last_micro_batch();
  // A layer has added its part of the weight's gradient (Weight::users).
  void gradient_done(WeightId id);
  // Sums what is left. Afterwards a rank's own pieces are complete; the rest of the buffer is undefined.
  void finish();
  // Every rank's new values to the others of its data-parallel group.
  void publish();

 private:
  struct ReplicaSum {
    Communicator* group;
    Range elements;
  };
  struct BucketState {
    std::vector<ReplicaSum> replica_sums;
    int users = 0;    // of its weights
    int missing = 0;  // of them in the last micro-batch
    bool summed = false;
  };
  void add_replica_sum(Communicator* group, Range elements);
  void sum(size_t bucket);

  const ParameterTable& table_;
  const RowOwnership& ownership_;
  Communicator& data_;
  const Stream& stream_;
  Stream queue_;
  std::vector<BucketState> buckets_;
  std::vector<size_t> bucket_of_;  // by weight
  bool last_micro_batch_ = false;
};

}  // namespace invar
