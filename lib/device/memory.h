#pragma once

#include <cstdint>

namespace invar {

// The most host memory that this process has had resident, in bytes.
int64_t peak_memory_bytes();

}  // namespace invar
