#pragma once

#include <cstdint>

namespace invar {

// One output of SplitMix64 (Steele et al., OOPSLA'14) from state x: a bijection of 64 bits, 0 no fixed point.
constexpr uint64_t split_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace invar
