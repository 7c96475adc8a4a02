#include "train/step_hash.h"

#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "checkpoint/hdf5_file.h"
#include "device/device.h"
#include "ops/block_hashes.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

// The tensors, their blocks all zero.
std::vector<TensorHash> empty_hashes(const ParameterTable& table, StateKind kind,
                                     std::map<const Parameter*, size_t>& index) {
  std::vector<TensorHash> tensors;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      if (kind != StateKind::kWeights && !parameter.trained) continue;
      index[&parameter] = tensors.size();
      const auto blocks = static_cast<size_t>(hash_blocks(parameter.numel()));
      tensors.push_back({parameter.name, parameter.shape, std::vector<int64_t>(blocks)});
    }
  }
  return tensors;
}

// Where the kind's values of an owned piece lie, a tensor as long as the piece.
Tensor values_of(const ParameterTable& table, const AdamW::OwnState& own, StateKind kind) {
  switch (kind) {
    case StateKind::kWeights:
      return own.master;
    case StateKind::kExpAvg:
      return own.exp_avg;
    case StateKind::kExpAvgSq:
      return own.exp_avg_sq;
    case StateKind::kGradients:
      return table.flat_gradients().rows(own.elements.begin, own.elements.end);
  }
  return {};
}

// Rows of `run` that the piece holds, as rows of the piece; none if it holds none. first_block: of the parameter's.
std::optional<ops::HashedRows> held_rows(const Weight& weight, const Parameter& parameter, const RowRun& run,
                                         const AdamW::OwnState& own, int64_t first_block) {
  const int64_t piece = (own.elements.begin - weight.offset) / weight.cols;  // its first row; pieces are whole rows
  const Range rows =
      intersect(Range{run.local, run.local + run.global.size()}, {piece, piece + own.elements.size() / weight.cols});
  if (rows.empty()) return std::nullopt;
  ops::LogicalIndex index = parameter.logical_index().from_row(run.global.begin + rows.begin - run.local);
  index.first += first_block * kHashBlock;
  return ops::HashedRows{{rows.begin - piece, rows.end - piece}, index};
}

// The tensors' blocks, from one after another in `blocks` of every rank; every element must have been added once.
void sum_over_ranks(Communicator& world, const Stream& stream, const Tensor& blocks, int64_t added,
                    std::vector<TensorHash>& tensors) {
  std::vector<int64_t> sums(static_cast<size_t>(blocks.dim(0) + 1));
  copy_across(stream, blocks, view_of(sums).rows(0, blocks.dim(0)));
  sums.back() = added;
  world.all_reduce(stream, view_of(sums), ReduceOp::kSum);
  int64_t elements = 0;
  auto next = sums.begin();
  for (TensorHash& tensor : tensors) {
    elements += std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
    for (int64_t& block : tensor.blocks) block = *next++;
  }
  INVAR_CHECK(sums.back() == elements, "{} elements of {} hashed", sums.back(), elements);
}

}  // namespace

std::vector<TensorHash> hash_state(const TrainState& state, const ProcessGroups& groups, StateKind kind) {
  const ParameterTable& table = state.parameters();
  std::map<const Parameter*, size_t> index;
  std::vector<TensorHash> tensors = empty_hashes(table, kind, index);
  std::vector<int64_t> ends = {0};  // of each tensor's blocks
  for (const TensorHash& tensor : tensors) ends.push_back(ends.back() + std::ssize(tensor.blocks));
  const Tensor blocks = state.block_hashes().rows(0, ends.back());
  ops::zero(state.stream(), blocks);
  int64_t added = 0;
  for (const AdamW::OwnState& own : state.optimizer().own_states()) {
    const Weight& weight = table.weight(own.weight);
    std::vector<ops::HashedRows> runs;
    for (const Parameter& parameter : weight.parameters) {
      const auto at = index.find(&parameter);
      if (at == index.end() || !parameter.counted()) continue;
      for (const RowRun& run : parameter.runs) {
        const auto held = held_rows(weight, parameter, run, own, ends[at->second]);
        if (!held) continue;
        INVAR_CHECK(held->index.at(held->rows.size() - 1, weight.cols - 1) < ends[at->second + 1] * kHashBlock,
                    "rows of '{}' beyond its end", parameter.name);
        runs.push_back(*held);
        added += held->rows.size() * weight.cols;
      }
    }
    if (runs.empty()) continue;
    const Tensor values = values_of(table, own, kind);
    ops::add_block_hashes(state.stream(), values.view({values.numel() / weight.cols, weight.cols}), runs, blocks);
  }
  sum_over_ranks(*groups.world, state.stream(), blocks, added, tensors);
  return tensors;
}

const StateHash& StepHash::finish() {
  for (const StateKind kind : {StateKind::kWeights, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    hash_.of(kind) = hash_state(state_, groups_, kind);
  }
  return hash_;
}

void write_block_hashes(const std::filesystem::path& run_directory, int64_t step, const StateHash& hash) {
  Hdf5Writer file(block_hashes_path(run_directory, step));
  file.set_attribute("step", step);
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    for (const TensorHash& tensor : hash.tensors[kind]) {
      const std::vector<int64_t> length = {std::ssize(tensor.blocks)}, dims = {std::ssize(tensor.shape)};
      file.write<int64_t>(format("{}/{}", kStateKindNames[kind], tensor.name), length, tensor.blocks);
      if (kind == 0) file.write<int64_t>("shape/" + tensor.name, dims, tensor.shape);
    }
  }
  file.finish_with_sum();
}

}  // namespace invar
