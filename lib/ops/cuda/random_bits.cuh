#pragma once

#include <cstdint>

namespace invar::ops::cuda {

// The finaliser of SplitMix64.
__device__ inline uint32_t random_bits(uint64_t seed, int64_t index) {
  uint64_t z = static_cast<uint64_t>(index) + seed * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

}  // namespace invar::ops::cuda
