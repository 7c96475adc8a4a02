#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace invar {

// What a random number is for; part of the key, so that streams never meet.
enum class RandomPurpose : uint32_t { kWeights = 1, kMockTokens = 2, kDataOrder = 3 };

// Counter-based random numbers: a value is a pure function of (seed, purpose, stream, index). There is no state to
// save, and any rank can compute any element. Philox4x32-10 of Salmon et al., SC'11.
class Philox {
 public:
  Philox(uint64_t seed, RandomPurpose purpose, uint64_t stream);

  constexpr std::array<uint32_t, 4> block(uint64_t index) const;  // four independent 32-bit words
  uint64_t bits64(uint64_t index) const;
  uint64_t below(uint64_t index, uint64_t bound) const;  // uniform in [0, bound)

  // Standard normal number of that index. By box_muller.h, so that the bits do not depend on the host's math
  // library.
  double normal(uint64_t index) const;

 private:
  std::array<uint32_t, 2> key_{};
  std::array<uint32_t, 2> high_counter_{};
};

constexpr std::array<uint32_t, 4> Philox::block(uint64_t index) const {
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), high_counter_[0],
                               high_counter_[1]};
  uint32_t k0 = key_[0];
  uint32_t k1 = key_[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// 64-bit FNV-1a: a stream number for a name.
uint64_t hash_name(std::string_view name);

}  // namespace invar
