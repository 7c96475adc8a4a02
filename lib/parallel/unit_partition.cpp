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

HeadPartition partition_heads(int64_t query_heads, int64_t kv_heads, int tensor_size, int tensor_rank) {
  const int64_t group = query_heads / kv_heads;
  HeadPartition part;
  if (tensor_size <= kv_heads) {
    part.kv_heads = split_units(kv_heads, tensor_size)[static_cast<size_t>(tensor_rank)];
    part.query_heads = {part.kv_heads.begin * group, part.kv_heads.end * group};
    part.heads_per_group = group;
    part.replica_color = tensor_rank;
    return part;
  }
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
