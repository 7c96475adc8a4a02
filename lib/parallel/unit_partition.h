#pragma once

#include <cstdint>
#include <vector>

#include "core/range.h"

namespace invar {

// Contiguous runs of `units` for `parts` ranks; the first units % parts runs are longer by one.
std::vector<Range> split_units(int64_t units, int parts);

// The query and KV heads of one tensor-parallel rank. Up to Hkv ranks, a rank holds whole KV groups. Beyond, the ranks
// are dealt out to the KV heads and each holds a run of its group's query heads and a copy of the KV head.
struct HeadPartition {
  Range query_heads;            // global query heads held
  Range kv_heads;               // global KV heads held, one if replicated
  int64_t heads_per_group = 0;  // query heads held per KV head held
  bool replicated = false;      // the KV head is also held by other ranks
  int replica_color = 0;        // equal for ranks that hold the same KV heads
};
// A rank with whole groups: these.
HeadPartition hold_groups(int64_t query_heads, int64_t kv_heads, Range held, int tensor_rank);
HeadPartition partition_heads(int64_t query_heads, int64_t kv_heads, int tensor_size, int tensor_rank);

}  // namespace invar
