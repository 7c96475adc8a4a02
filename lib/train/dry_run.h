#pragma once

#include "checkpoint/hf_weights.h"
#include "train/train_state.h"

// What is known of a run without running it: the real code on meta tensors, which have no bytes, and on communicators
// that move nothing.
namespace invar {

// What a rank needs on a device of the given kind, found by running one step of the real code on meta tensors.
// `traffic`, if given, receives what the rank sends in one micro-step and the step's end. Not collective.
MemorySizes measure_memory(const Config& config, const Topology& topology, int world_rank,
                           DeviceType target = DeviceType::kCpu, TrafficTable* traffic = nullptr);

// Elements of the whole model, at any layout.
struct ParameterCounts {
  int64_t trained = 0;
  int64_t constant = 0;  // of the checkpoint, applied but not trained
};
ParameterCounts count_parameters(const Config& config);

// The model's parameters as a checkpoint names them, all rows as they lie in files; for a writer without a run.
std::vector<StateTensor> checkpoint_tensors(const ModelConfig& model);

// Refuses weights that load_hf_weights() would refuse, without memory for them. Not collective.
void check_hf_weights(const Config& config, const Topology& topology, int world_rank, const HfWeights& weights);

}  // namespace invar
