#include "train/step_hash.h"

#include <functional>
#include <map>
#include <numeric>

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
  const std::vector<AdamW::OwnState> states = state.optimizer().own_states();
  std::vector<std::vector<ops::HashedRows>> runs(states.size());  // by piece
  for (const OwnedRows& own : state.ownership().owned_rows()) {
    const auto at = index.find(own.parameter);
    if (at == index.end()) continue;
    const int64_t cols = own.parameter->cols();
    ops::LogicalIndex logical = own.parameter->logical_index().from_row(own.rows.begin);
    logical.first += ends[at->second] * kHashBlock;
    INVAR_CHECK(logical.at(own.rows.size() - 1, cols - 1) < ends[at->second + 1] * kHashBlock,
                "rows of '{}' beyond its end", own.parameter->name);
    const int64_t first = (own.elements.begin - states[own.piece].elements.begin) / cols;
    runs[own.piece].push_back({{first, first + own.rows.size()}, logical});
    added += own.elements.size();
  }
  for (size_t piece = 0; piece < states.size(); ++piece) {
    if (runs[piece].empty()) continue;
    const Tensor values = values_of(table, states[piece], kind);
    const int64_t cols = table.weight(states[piece].weight).cols;
    ops::add_block_hashes(state.stream(), values.view({values.numel() / cols, cols}), runs[piece], blocks);
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
