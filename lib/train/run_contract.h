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

// Of a run on GPUs with that cuDNN (its version; empty: none): "cudnn-9.19.0" if a layer may take its attention from
// it, else "own". What cuDNN itself refuses, as on another GPU or at another layout, says nothing here.
std::string attention_of(const Config& config, const std::string& cudnn);

// Error{kConfig}, on every rank, if their contracts differ: GPUs of several architectures, several versions of cuDNN.
// Collective.
void agree_on_contract(const std::optional<NumericsContract>& contract, Communicator& world);

}  // namespace invar
