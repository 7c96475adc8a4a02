#pragma once

#include <filesystem>

#include "observe/metrics.h"
#include "train/run_outputs.h"
#include "train/step.h"

namespace invar {

// The hashes of one kind of tensor of the state, in the order of the model's parameters, the same on every rank. Each
// element counts once, on the rank that owns it; only sums of hashes travel. Gradients: after they are complete and
// before the next step begins, while no micro-batch runs. Collective over the world.
std::vector<TensorHash> hash_state(const TrainState& state, const ProcessGroups& groups, StateKind kind);

// The same of all kinds for a step: gradients() as StepHooks::gradients_complete, finish() after the update.
class StepHash {
 public:
  StepHash(const TrainState& state, const ProcessGroups& groups) : state_(state), groups_(groups) {}

  void gradients() { hash_.of(StateKind::kGradients) = hash_state(state_, groups_, StateKind::kGradients); }
  const StateHash& finish();

 private:
  const TrainState& state_;
  const ProcessGroups& groups_;
  StateHash hash_;
};

// Writes block_hashes_path(), in place of an earlier one. By it `invar compare` names the first block that differs.
// The file has the attribute step and these tensors:
//   KIND/NAME   i64 (blocks), the hashes of the tensor's blocks as two's complement
//   shape/NAME  i64 (dims), of the tensors of kind weights
void write_block_hashes(const std::filesystem::path& run_directory, int64_t step, const StateHash& hash);

}  // namespace invar
