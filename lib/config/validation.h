#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "config/replica_plan.h"

namespace invar {

// train.micro_batch_size, with numerics.reduction: invariant, at most: ops::kMostSamples.
inline constexpr int64_t kMostMicroBatch = 896;
// Far above any run: samples of a step, tokens of a micro-batch and of a whole run.
inline constexpr int64_t kMostSamplesOfStep = 1 << 24;
inline constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kMostTokensInAll = int64_t{1} << 62;

// Judges the values of a training config together, for a job of `launched` ranks: all that can be refused without data,
// weights or peers. The hosts are those of the ranks, if they are known; plan_replicas() says when they must be. The
// first broken rule throws Error{kConfig} with the place (file:line or argument),
// the keys, the rule, the numbers and the fix. Pure: every rank reaches the same verdict.
// Not judged here: whether the build has CUDA (the device layer knows), and what is inside files.
void validate(const Config& config, int launched, std::span<const HostSlot> hosts = {});

// Whether the data has samples that are kept for evaluations. Error{kConfig} for a data.split that is none.
bool has_validation_data(const Config& config);

// Tensor-parallel degrees at which this model can be cut with these numerics, ascending. Equal runs of units; with
// `uneven`, any runs.
std::vector<int> fitting_tensor_degrees(const Config& config, bool uneven);

// Data-parallel degrees at which a global batch can be dealt out in these micro-batches with these numerics, ascending.
std::vector<int> fitting_data_degrees(const Config& config, int64_t batch);

}  // namespace invar
