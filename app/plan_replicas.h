#pragma once

#include <span>

#include "config/replica_plan.h"
#include "core/dtype.h"
#include "device/device.h"

namespace invar::app {

// The part of `invar plan` on replicas that are not a whole grid, or on idle ranks. It says who does what on which
// units, and what is left out. `hosts`: empty if they are not known.
void print_replicas(const Config& config, const ReplicaPlan& plan, std::span<const HostSlot> hosts);

// What the plan costs beside the whole grid, and beside leaving damaged replicas out: modelled time, memory and bytes.
void print_cost(const Config& config, const ReplicaPlan& plan, DeviceType device);

}  // namespace invar::app
