#pragma once

#include "core/split_mix.h"

namespace invar::ops::cuda {

__device__ inline uint32_t random_bits(uint64_t seed, int64_t index) {
  return static_cast<uint32_t>(split_mix(static_cast<uint64_t>(index) + seed * 0x9e3779b97f4a7c15u) >> 32);
}

}  // namespace invar::ops::cuda
