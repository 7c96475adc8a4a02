#pragma once

#include "comm/communicator.h"
#include "config/replica_plan.h"

namespace invar {

// Collective: every rank of the job has the same plan and the same config, but for comm.* and where paths lead, before
// anything is built by them. Otherwise Error{kConfig} on every rank, which names the first key and rank that differ
// from rank 0.
void check_plan(const Config& config, const ReplicaPlan& plan, Communicator& world);

}  // namespace invar
