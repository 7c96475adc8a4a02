#pragma once

#include <deque>

#include "comm/recording_communicator.h"
#include "parallel/head_cut.h"
#include "parallel/row_ownership.h"
#include "parallel/unit_partition.h"

// Tables with the copies that a model has: norms on all ranks of a replica, KV heads on some, beside rows that one rank
// alone has.
namespace invar::test {

// Eight query heads and two KV heads, of which beyond two ranks several have copies.
struct CopiedHeads {
  explicit CopiedHeads(const Communicator& tensor) : CopiedHeads(tensor.size(), tensor.rank()) {}
  CopiedHeads(int size, int rank) : part(partition_heads(8, 2, 0, size, rank)) {}
  HeadPartition part;
};

inline Parameter held_rows(std::string name, std::vector<int64_t> shape, std::vector<RowRun> runs,
                           Communicator* replicas = nullptr) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = std::move(shape);
  parameter.runs = std::move(runs);
  parameter.replicas = replicas;
  return parameter;
}

inline void add_weight(ParameterTable& table, std::string name, int64_t rows, std::vector<Parameter> parameters) {
  Weight weight;
  weight.name = std::move(name);
  weight.rows = rows;
  weight.cols = parameters.front().cols();
  weight.parameters = std::move(parameters);
  table.add(std::move(weight));
}

// copies: the ranks of the tensor group that hold the same KV heads.
inline void fill_with_copies(ParameterTable& table, Communicator& tensor, const CopiedHeads& heads,
                             Communicator* copies) {
  const auto rank = static_cast<size_t>(tensor.rank());
  add_weight(table, "norm", 37, {held_rows("norm", {37}, {{{0, 37}, 0}}, &tensor)});

  constexpr int64_t kDim = 3, kCols = 5;
  const HeadPartition& part = heads.part;
  const int64_t group = (part.heads_per_group + 2) * kDim;
  std::vector<RowRun> q, k, v;
  for (int64_t kv = part.kv_heads.begin; kv < part.kv_heads.end; ++kv) {
    const int64_t local = (kv - part.kv_heads.begin) * group;
    const int64_t first = part.query_heads.begin + (kv - part.kv_heads.begin) * part.heads_per_group;
    q.push_back({{first * kDim, (first + part.heads_per_group) * kDim}, local});
    k.push_back({{kv * kDim, (kv + 1) * kDim}, local + part.heads_per_group * kDim});
    v.push_back({{kv * kDim, (kv + 1) * kDim}, local + (part.heads_per_group + 1) * kDim});
  }
  Communicator* const replicas = part.replicated ? copies : nullptr;
  add_weight(table, "qkv", part.kv_heads.size() * group,
             {held_rows("q", {8 * kDim, kCols}, q), held_rows("k", {2 * kDim, kCols}, k, replicas),
              held_rows("v", {2 * kDim, kCols}, v, replicas)});

  const Range blocks = split_units(7, tensor.size())[rank];
  Parameter down = held_rows("down", {6, 14}, {{blocks, 0}});
  down.transposed = true;
  down.column_block = 2;
  add_weight(table, "down", blocks.size(), {down});

  const Range vocabulary = split_units(11, tensor.size())[rank];  // and a row of padding
  add_weight(table, "embedding", vocabulary.size() + 1, {held_rows("embedding", {11, 4}, {{vocabulary, 0}})});
  add_weight(table, "k_norm", 13, {held_rows("k_norm", {13}, {{{0, 13}, 0}}, &tensor)});
}

// The layouts of all ranks, as a run without peers sees them.
struct CopiedTables {
  explicit CopiedTables(const Topology& topology) {
    for (int rank = 0; rank < topology.world(); ++rank) {
      const int width = topology.width(topology.replica_of(rank)), tensor_rank = topology.tensor_rank(rank);
      const auto group = [&](int64_t own, int64_t size) {
        groups.push_back(make_recording_communicator(static_cast<int>(own), static_cast<int>(size), "group", &ignored));
        return groups.back().get();
      };
      const CopiedHeads heads(width, tensor_rank);
      const Range& replicas = heads.part.replicas;
      fill_with_copies(tables.emplace_back(), *group(tensor_rank, width), heads,
                       group(tensor_rank - replicas.begin, replicas.size()));
      Arena values("values", DeviceType::kMeta, 0), gradients("gradients", DeviceType::kMeta, 0);
      tables.back().allocate(values, gradients, DType::kF32);
      all.push_back(&tables.back());
    }
  }
  TrafficTable ignored;
  std::vector<std::unique_ptr<Communicator>> groups;
  std::deque<ParameterTable> tables;
  std::vector<const ParameterTable*> all;
};

// table: of the rank, its groups being real or not.
inline RowOwnership ownership_of(const Topology& topology, const CopiedTables& ranks, int rank,
                                 const ParameterTable& table, int64_t bucket) {
  if (topology.uniform()) return {table, topology.data, topology.replica_of(rank), bucket};
  return {topology, ranks.all, rank, table, bucket};
}

// Of replicas of one width and of unequal ones.
inline std::vector<Topology> copied_topologies() {
  std::vector<Topology> all;
  for (const int tensor : {1, 2, 3, 4, 5, 7}) {
    for (const int data : {1, 2, 3}) all.push_back({tensor, data, {}, {}});
  }
  for (const std::vector<int>& widths :
       std::vector<std::vector<int>>{{3, 4}, {4, 1}, {5, 3, 2}, {1, 1, 4}, {3, 3, 3}}) {
    all.push_back({std::ranges::max(widths), static_cast<int>(widths.size()), widths, {}});
  }
  return all;
}

}  // namespace invar::test
