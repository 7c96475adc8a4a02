#pragma once

#include <memory>

#include "parallel/reduction_tree.h"
#include "parallel/row_ownership.h"

namespace invar {

// What the sums of a step's gradients over replicas work with. All of it outlives them.
struct SyncContext {
  const ParameterTable& table;
  const RowOwnership& ownership;
  const ProcessGroups& groups;
  const Stream& stream;  // of the backward pass
  const Stream& queue;   // beside it, where the device has several
  Arena& staging;        // where other ranks' gradients arrive
};

// Sums the gradients of a bucket over all ranks that hold the same rows; a row's sum is complete on its owner.
class ReplicaSums {
 public:
  virtual ~ReplicaSums() = default;
  // Queued on SyncContext::queue, after what is on the stream now. Collective over the groups of its rows.
  virtual void sum(size_t bucket) = 0;
};

// Fast: parts of copies over the ranks of a replica that hold them, then a reduce-scatter over the replicas.
std::unique_ptr<ReplicaSums> fast_replica_sums(const SyncContext& ctx);
// By the tree of a plan over the replicas' sums of samples (WorkerOrder::plan).
std::unique_ptr<ReplicaSums> invariant_replica_sums(const SyncContext& ctx, const TreePlan& plan);

// What each replica owns of a bucket, where all have one width.
const std::vector<int64_t>& owned_counts(const RowOwnership& ownership, size_t bucket);

// Rows of a bucket that several ranks of a replica hold.
struct CopiedRows {
  Communicator* group;
  Range elements;
};
// By bucket, neighbours joined, with the padding between weights: of all parameters, or of those of which each copy has
// a part of the gradient.
std::vector<std::vector<CopiedRows>> copied_rows(const ParameterTable& table, const RowOwnership& ownership,
                                                 bool in_parts);

}  // namespace invar
