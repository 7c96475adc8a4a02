#include "core/philox.h"

#include <cmath>

#include "core/box_muller.h"

namespace invar {

Philox::Philox(uint64_t seed, RandomPurpose purpose, uint64_t stream) {
  key_ = {static_cast<uint32_t>(seed),
          static_cast<uint32_t>(seed >> 32) ^ (static_cast<uint32_t>(purpose) * 0x85ebca6bu)};
  high_counter_ = {static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
}

uint64_t Philox::bits64(uint64_t index) const {
  const auto words = block(index);
  return (uint64_t{words[1]} << 32) | words[0];
}

uint64_t Philox::below(uint64_t index, uint64_t bound) const {
  // 128-bit multiply-shift; the bias of at most bound / 2^64 is far below anything a run can see.
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits64(index)) * bound) >> 64);
}

double Philox::normal(uint64_t index) const {
  const RadiusAndCosine point = box_muller(block(index));
  return std::sqrt(point.squared_radius) * point.cosine;
}

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace invar
