#pragma once

#include <set>
#include <span>

#include "config/replica_plan.h"

namespace invar {

// Slots of the grid tensor · data, numbered slot + tensor · replica; beyond them spares.
// Of parallel.nonuniform.failed, and of Megatron-LM's form: of each of the first num_reduced_tp_dp_ranks replicas the
// last tp_spares slots, or those that non_active_ranks_per_dp names. There all reduced replicas have the same width and
// shorter lists are filled up with healthy slots; here a shorter list is just that.
// Error{kConfig} for an entry that names no slot and no launched host.
std::set<int> failed_slots(const Config& config, int launched, std::span<const HostSlot> hosts);

// tp_base, if it is given, is parallel.tensor.
void check_tp_base(const Config& config);

}  // namespace invar
