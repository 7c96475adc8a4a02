#pragma once

#include "device/device.h"
#include "parallel/sum_policy.h"
#include "parallel/weight_store.h"

namespace invar {

// Completes the gradients of a step and hands out its new values, a bucket at a time, on a queue beside the backward
// pass where the device has several. Gradients are summed over the replicas as soon as a bucket is complete
// (ReplicaSums). New values travel beside the update of the buckets that follow and the next forward pass.
class GradientSync : public GradientListener, public ValueSource {
 public:
  // In invariant numerics `staging` is where other ranks' gradients arrive. All outlive this, the policy too.
  GradientSync(const ParameterTable& table, const RowOwnership& ownership, const ProcessGroups& groups,
               const Stream& stream, const SumPolicy& sums, Arena& staging);
  GradientSync(const GradientSync&) = delete;
  GradientSync& operator=(const GradientSync&) = delete;

  // The micro-batch that follows is the step's last: a bucket is summed as soon as its gradients are there.
  void begin_last_micro_batch();
  void gradient_done(WeightId id) override;
  // Sums what is left. Afterwards the rows that a rank owns are complete; the rest of the buffer is undefined.
  void finish();
  // The owners' new values of a bucket to all ranks that hold the rows.
  void publish(size_t bucket);
  void await_values(WeightId id) override;
  // What is queued from now on finds the new values of all weights.
  void await_values() const;

 private:
  struct BucketState {
    int users = 0;    // of its weights
    int missing = 0;  // of them in the last micro-batch
    bool summed = false;
    StreamMark published;
    bool awaited = true;
  };
  void sum(size_t bucket);
  void gather_values(size_t bucket);
  void exchange_values(size_t bucket);

  const ParameterTable& table_;
  const RowOwnership& ownership_;
  Communicator& holders_;
  Communicator* exchange_;  // of replicas of unequal widths; else null
  const Stream& stream_;
  Stream queue_;
  std::unique_ptr<ReplicaSums> sums_;
  std::vector<std::vector<CopiedRows>> copies_;  // by bucket
  std::vector<BucketState> buckets_;
  bool last_micro_batch_ = false;
};

}  // namespace invar
