#pragma once

#include <array>
#include <cstdint>
#include <filesystem>

namespace invar {

// The cores of a host, a bit each.
using CoreSet = std::array<uint64_t, 64>;

// Those that this process is bound to, by a launcher or a container; all of them if the system does not say.
CoreSet bound_cores();
int count(const CoreSet& cores);

// How many of so many cores the quotas of the process's control groups leave it, a container's limit on CPU time: at
// least one. root: of the file system, for tests.
int within_quota(int cores, const std::filesystem::path& root = "/");

}  // namespace invar
