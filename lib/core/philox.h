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

  std::array<uint32_t, 4> block(uint64_t index) const;  // four independent 32-bit words
  uint64_t bits64(uint64_t index) const;
  uint64_t below(uint64_t index, uint64_t bound) const;  // uniform in [0, bound)

  // Standard normal number of that index. Own log, sin and cos on plain double arithmetic, so that the bits do not
  // depend on the host's math library.
  double normal(uint64_t index) const;

 private:
  std::array<uint32_t, 2> key_{};
  std::array<uint32_t, 2> high_counter_{};
};

// 64-bit FNV-1a: a stream number for a name.
uint64_t hash_name(std::string_view name);

}  // namespace invar
