#include "train/step_hash.h"

#include <algorithm>
#include <map>

#include "checkpoint/hdf5_file.h"
#include "parallel/logical_tensor.h"

namespace invar {
namespace {

constexpr int64_t kPieceElements = 4 << 20;  // in host memory at once

// The tensors, their blocks all zero.
std::vector<TensorHash> empty_hashes(const ParameterTable& table, StateKind kind,
                                     std::map<const Parameter*, size_t>& index) {
  std::vector<TensorHash> tensors;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      if (kind != StateKind::kWeights && !parameter.trained) continue;
      index[&parameter] = tensors.size();
      const auto blocks = static_cast<size_t>(hash_blocks(parameter.numel()));
      tensors.push_back({parameter.name, parameter.shape, std::vector<uint64_t>(blocks)});
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

// Rows of `run` that the piece holds go to the blocks, a few at a time.
int64_t add_run(const Stream& stream, const Weight& weight, const Parameter& parameter, const RowRun& run,
                const AdamW::OwnState& own, const Tensor& values, std::span<uint64_t> blocks) {
  const int64_t begin = weight.offset + run.local * weight.cols;
  const Range held = intersect({begin, begin + run.global.size() * weight.cols}, own.elements);
  const int64_t step = std::max<int64_t>(1, kPieceElements / weight.cols) * weight.cols;
  for (int64_t at = held.begin; at < held.end; at += step) {
    const Range part{at, std::min(at + step, held.end)};
    const int64_t first = run.global.begin + (part.begin - begin) / weight.cols;  // pieces are whole rows
    const std::vector<float> stored =
        read_f32(stream, values, {part.begin - own.elements.begin, part.end - own.elements.begin});
    add_to_blocks(parameter, {first, first + part.size() / weight.cols}, stored, blocks, stream.threads());
  }
  return std::max<int64_t>(0, held.size());
}

// The sums over the ranks; every element must have been added once.
void sum_over_ranks(Communicator& world, const Stream& stream, std::vector<TensorHash>& tensors, int64_t added) {
  int64_t elements = 0;
  std::vector<int64_t> sums = {added};
  for (const TensorHash& tensor : tensors) {
    int64_t numel = 1;
    for (const int64_t dim : tensor.shape) numel *= dim;
    elements += numel;
    for (const uint64_t block : tensor.blocks) sums.push_back(static_cast<int64_t>(block));
  }
  world.all_reduce(stream, view_of(sums), ReduceOp::kSum);
  INVAR_CHECK(sums[0] == elements, "{} elements of {} hashed", sums[0], elements);
  auto next = sums.begin() + 1;
  for (TensorHash& tensor : tensors) {
    for (uint64_t& block : tensor.blocks) block = static_cast<uint64_t>(*next++);
  }
}

}  // namespace

std::vector<TensorHash> hash_state(const TrainState& state, const ProcessGroups& groups, StateKind kind) {
  const ParameterTable& table = state.parameters();
  std::map<const Parameter*, size_t> index;
  std::vector<TensorHash> tensors = empty_hashes(table, kind, index);
  int64_t added = 0;
  for (const AdamW::OwnState& own : state.optimizer().own_states()) {
    const Weight& weight = table.weight(own.weight);
    for (const Parameter& parameter : weight.parameters) {
      const auto at = index.find(&parameter);
      if (at == index.end() || !parameter.counted()) continue;
      for (const RowRun& run : parameter.runs) {
        added += add_run(state.stream(), weight, parameter, run, own, values_of(table, own, kind),
                         tensors[at->second].blocks);
      }
    }
  }
  sum_over_ranks(*groups.world, state.stream(), tensors, added);
  return tensors;
}

const StateHash& StepHash::finish() {
  for (const StateKind kind : {StateKind::kWeights, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    hash_.of(kind) = hash_state(state_, groups_, kind);
  }
  return hash_;
}

std::filesystem::path block_hashes_path(const std::filesystem::path& run_directory, int64_t step) {
  return run_directory / format("hash_step_{:08}.h5", step);
}

void write_block_hashes(const std::filesystem::path& run_directory, int64_t step, const StateHash& hash) {
  Hdf5Writer file(block_hashes_path(run_directory, step));
  file.set_attribute("step", step);
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    for (const TensorHash& tensor : hash.tensors[kind]) {
      const std::vector<int64_t> blocks(tensor.blocks.begin(), tensor.blocks.end());
      const std::vector<int64_t> length = {std::ssize(blocks)}, dims = {std::ssize(tensor.shape)};
      file.write<int64_t>(format("{}/{}", kStateKindNames[kind], tensor.name), length, blocks);
      if (kind == 0) file.write<int64_t>("shape/" + tensor.name, dims, tensor.shape);
    }
  }
  file.finish();
}

}  // namespace invar
