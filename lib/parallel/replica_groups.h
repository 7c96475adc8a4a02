#pragma once

#include <map>
#include <memory>

#include "parallel/topology.h"

namespace invar {

// The groups of tensor-parallel ranks that hold copies of the same KV head, made once per pair of head counts.
class ReplicaGroups {
 public:
  explicit ReplicaGroups(const ProcessGroups& groups) : groups_(groups) {}

  // Null if no rank holds a copy, which is so up to Hkv ranks. Collective over the tensor group on first use of a pair.
  Communicator* kv_heads(int64_t query_heads, int64_t kv_heads);
  // The whole tensor group: for norms, which every rank holds.
  Communicator* tensor() const { return groups_.tensor.get(); }

 private:
  const ProcessGroups& groups_;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Communicator>> kv_;
};

}  // namespace invar
