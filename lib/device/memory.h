#pragma once

#include <cstdint>
#include <filesystem>

#include "device/stream.h"

namespace invar {

// The most memory that this process has had, in bytes: resident host memory; on CUDA what is taken of the GPU now, by
// other processes too.
int64_t peak_memory_bytes(const Stream& stream);

// Bytes of the host, or of the container that this process is in, where that may have fewer.
struct HostMemory {
  int64_t total = 0;
  int64_t available = 0;  // that nobody else on the host has now
};
// root: of the file system, for tests.
HostMemory host_memory(const std::filesystem::path& root = "/");

}  // namespace invar
