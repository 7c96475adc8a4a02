#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"

namespace invar {

// Time of a micro-batch on a replica of this width, as a part of that on one rank: at every kind of work (attention,
// FFN, head; weighted by their matrix products) the rank with the most units keeps the others waiting, so that N units
// on T ranks take ceil(N / T) / N. Communication is not counted.
double modelled_time(const Config& config, int width);

// Micro-batches per unit of time of each live replica: parallel.nonuniform.speeds, or modelled. `grid_replicas`: the
// index of each live replica among those that were planned.
std::vector<double> replica_speeds(const Config& config, std::span<const int> widths,
                                   std::span<const int> grid_replicas);

// Samples of a step that can be dealt out together: a micro-batch; with invariant numerics as many as begin and end
// with a logical worker too.
int64_t share_unit(const Config& config, int64_t batch);

// Samples of a step for each of the replicas. `full_batch`: what `data` whole replicas would share. keep: each gets a
// share, then one after another goes to the replica with the least resulting time, (n + 1) / speed, the first of equal
// ones. shrink: a replica gets as many micro-batches as it can do in the time in which the fastest does
// full_batch / data samples, and at least one; with invariant numerics then less, as far as the shares must be whole
// workers.
// Error{kConfig} if there are fewer shares than replicas, or the batch cannot be cut in shares.
std::vector<int64_t> share_samples(const Config& config, int64_t full_batch, int data, std::span<const double> speeds);

}  // namespace invar
