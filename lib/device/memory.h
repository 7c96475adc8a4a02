#pragma once

#include <cstdint>

#include "device/stream.h"

namespace invar {

// The most memory that this process has had, in bytes: resident host memory; on CUDA what is taken of the GPU now, by
// other processes too.
int64_t peak_memory_bytes(const Stream& stream);

// What the host has in all, in bytes.
int64_t host_memory_bytes();

}  // namespace invar
