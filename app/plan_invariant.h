#pragma once

#include <span>

#include "config/config.h"
#include "parallel/topology.h"

namespace invar::app {

// For numerics.reduction: invariant, what is summed how: leaves and nodes of tensor ranks, workers and gradient buffers
// of data ranks, the contract, and which layouts have the same bits.
void print_invariant(const Config& config, const Topology& grid, DeviceType device);

// Of these replicas the first with the most sums of samples: those that outlive a micro-batch, then those at once. With
// fast numerics, the first. Not always the one with the most memory: spares of a large vocabulary count for less here.
int fullest_data_rank(const Config& config, const Topology& grid, std::span<const int> replicas);

}  // namespace invar::app
