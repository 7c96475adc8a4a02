#include "parallel/replica_groups.h"

#include "parallel/head_cut.h"

namespace invar {

Communicator* ReplicaGroups::kv_heads(int64_t query_heads, int64_t kv_heads) {
  const int size = groups_.tensor->size();
  if (size <= kv_heads) return nullptr;
  auto& group = kv_[{query_heads, kv_heads}];
  if (group == nullptr) {
    std::vector<int> colors;
    for (int rank = 0; rank < size; ++rank) {
      colors.push_back(partition_heads(query_heads, kv_heads, 0, size, rank).replica_color);
    }
    group = groups_.maker.make(*groups_.tensor, colors, "kv replicas");
  }
  return group.get();
}

}  // namespace invar
