#include "parallel/unit_partition.h"

#include "config/units.h"
#include "core/error.h"

namespace invar {

std::vector<Range> split_units(int64_t units, int parts) {
  INVAR_CHECK(parts > 0, "{} parts", parts);
  std::vector<Range> runs;
  for (int part = 0; part < parts; ++part) {
    runs.push_back({run_begin(units, parts, part), run_begin(units, parts, part + 1)});
  }
  return runs;
}

HeadPartition hold_groups(int64_t query_heads, int64_t kv_heads, Range held, int tensor_rank) {
  HeadPartition part;
  part.heads_per_group = query_heads / kv_heads;
  part.kv_heads = held;
  part.query_heads = {held.begin * part.heads_per_group, held.end * part.heads_per_group};
  part.replica_color = tensor_rank;
  return part;
}

HeadPartition partition_heads(int64_t query_heads, int64_t kv_heads, int tensor_size, int tensor_rank) {
  if (tensor_size <= kv_heads) {
    const Range held = split_units(kv_heads, tensor_size)[static_cast<size_t>(tensor_rank)];
    return hold_groups(query_heads, kv_heads, held, tensor_rank);
  }
  const int64_t group = query_heads / kv_heads;
  HeadPartition part;
  const auto ranks_of_head = split_units(tensor_size, static_cast<int>(kv_heads));
  int head = 0;
  while (!ranks_of_head[static_cast<size_t>(head)].contains(tensor_rank)) ++head;
  const Range ranks = ranks_of_head[static_cast<size_t>(head)];
  const Range run = split_units(group, static_cast<int>(ranks.size()))[static_cast<size_t>(tensor_rank - ranks.begin)];
  part.kv_heads = {head, head + 1};
  part.query_heads = {head * group + run.begin, head * group + run.end};
  part.heads_per_group = run.size();
  part.replicated = ranks.size() > 1;
  part.replica_color = head;
  return part;
}

}  // namespace invar
