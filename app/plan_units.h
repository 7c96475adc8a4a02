#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "parallel/head_cut.h"
#include "parallel/topology.h"

namespace invar::app {

// Units, and heads, that a tensor rank of a replica of that width holds.
Range held_units(const Config& config, int64_t units, int width, int tensor_rank);
HeadPartition held_heads(const Config& config, int64_t kv_heads, int width, int tensor_rank);

// Replicas that stand for all: of a uniform grid one with the most sums of samples, else the first of each width.
std::vector<int> shown_replicas(const Config& config, const Topology& grid);

// "1234.5", right-aligned.
std::string mib(int64_t bytes);

}  // namespace invar::app
