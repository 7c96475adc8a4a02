#pragma once

#include "comm/communicator.h"
#include "config/replica_plan.h"

namespace invar {

// Collective: every rank of the job has the same plan, before anything is built by it. Otherwise Error{kConfig} on
// every rank, which names the first one whose plan differs from that of rank 0.
void check_plan(const ReplicaPlan& plan, Communicator& world);

}  // namespace invar
