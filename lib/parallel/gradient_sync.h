#pragma once

#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "parallel/row_ownership.h"
#include "parallel/worker_order.h"

namespace invar {

// Completes the gradients of a step and hands out its new values. Gradients are summed a bucket at a time: partial ones
// over the replicas that hold the same rows inside a tensor-parallel group, then all over the data-parallel ranks, on a
// queue beside the backward pass where the device has several. New values travel on that queue too, beside the update
// of the buckets that follow and the next forward pass. Where the replicas are of unequal widths, every rank sends its
// part of each block (SharedBlock) to the rank that owns it, which adds them by a tree over the replicas.
class GradientSync {
 public:
  // `order`: of the sums over data-parallel ranks; null: any. In fixed order `staging` is where others' terms arrive.
  // Collective over the world. Error{kFault}: copies of rows that sums in any order would let drift apart, as their
  // owners differ (training_topology).
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
  // What one exchange moves, and what is then added.
  struct Terms {
    struct Sum {
      Tensor terms;  // f32 (nodes, elements)
      Tensor out;
    };
    std::vector<Message> sends, receives;
    std::vector<Sum> sums;
  };
  void add_copies(std::vector<Copies> BucketState::*kind, Communicator* group, Range elements);
  void check_equal_cuts(Communicator& world) const;
  Range own_part(size_t bucket, Range elements) const;
  void sum(size_t bucket);
  void sum_in_order(size_t bucket);
  void sum_nodes(Range elements, std::span<const int64_t> counts);
  const TreePlan& plan() const { return order_ != nullptr ? order_->plan() : *replica_plan_; }
  void exchange_sums(size_t bucket);
  void exchange_terms(size_t bucket, std::optional<WeightId> second);
  void give_terms(int owner, Range elements, Terms& terms) const;
  void take_terms(const SharedBlock& block, Range elements, Terms& terms);
  void exchange_values(size_t bucket);
  void make_copies_equal();

  const ParameterTable& table_;
  const RowOwnership& ownership_;
  Communicator& data_;
  Communicator* exchange_;                // of replicas of unequal widths; null: data_ sums
  std::optional<TreePlan> replica_plan_;  // of their sums in any order
  const Stream& stream_;
  Stream queue_;
  const WorkerOrder* order_;
  Arena& staging_;
  std::vector<BucketState> buckets_;
  bool last_micro_batch_ = false;
};

}  // namespace invar
