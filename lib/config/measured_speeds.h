#pragma once

#include <span>
#include <string>
#include <vector>

#include "config/replica_plan.h"

namespace invar {

// What the measured work of replicas says of how they share a batch.
struct MeasuredSpeeds {
  // Samples per second of the replicas of the grid, as parallel.nonuniform.speeds takes them: relative to the fastest
  // one, to three digits, and 1 for one that is left out, of which nothing is known.
  std::vector<double> speeds;
  struct Share {
    std::vector<int64_t> samples;  // of a step, of each live replica
    double seconds = 0;            // of the replica that works longest on them
  };
  Share now;
  Share then;           // by these speeds; without samples if the config cannot share the batch so
  std::string refusal;  // why it cannot, and what helps

  // The batch shared by these speeds would take a tenth less time for its size.
  bool far_from_shares() const;
  // "parallel.nonuniform.speeds=[1, 0.62] shares the batch 10, 6 instead of 8, 8 samples: ..."
  std::string describe() const;
};

// seconds, above 0: what each live replica of the plan worked on its samples of a step, waiting for others not counted.
// config: what was planned from.
MeasuredSpeeds measured_speeds(const Config& config, const ReplicaPlan& plan, std::span<const double> seconds);

}  // namespace invar
