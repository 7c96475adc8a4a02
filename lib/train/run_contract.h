#pragma once

#include <optional>

#include "comm/communicator.h"
#include "config/contract.h"
#include "device/device.h"

namespace invar {

// The contract of a run whose ranks compute on such devices; on CUDA, on this GPU. None with fast numerics.
std::optional<NumericsContract> run_contract(const Config& config, DeviceType device, int gpu);
// The same on the stream's device.
std::optional<NumericsContract> run_contract(const Config& config, const Stream& stream);

// Error{kConfig}, on every rank, if their contracts differ: GPUs of several architectures. Collective.
void agree_on_contract(const std::optional<NumericsContract>& contract, Communicator& world);

}  // namespace invar
