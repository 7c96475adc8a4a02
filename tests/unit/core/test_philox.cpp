#include "core/philox.h"

#include <cmath>
#include <set>

#include "support/catch.h"

using namespace invar;

namespace {

// The published algorithm once more, with key and counter given whole.
std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

}  // namespace

TEST_CASE("Philox4x32-10 gives the published vectors") {
  // Known answers of the Random123 distribution.
  CHECK(philox4x32_10({0, 0, 0, 0}, {0, 0}) == std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  const uint64_t seed = 0x1234567890abcdefULL;
  const Philox random(seed, RandomPurpose::kWeights, 0xdeadbeef00112233ULL);
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) ^ 0x85ebca6bu};
  CHECK(random.block(0x5566778899aabbccULL) == philox4x32_10({0x99aabbcc, 0x55667788, 0x00112233, 0xdeadbeef}, key));
}

TEST_CASE("streams, seeds and purposes do not meet") {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    for (const auto purpose : {RandomPurpose::kWeights, RandomPurpose::kMockTokens, RandomPurpose::kDataOrder}) {
      for (uint64_t stream = 0; stream < 5; ++stream) {
        for (uint64_t index = 0; index < 20; ++index) seen.insert(Philox(seed, purpose, stream).bits64(index));
      }
    }
  }
  CHECK(seen.size() == 5 * 3 * 5 * 20);
}

TEST_CASE("below() covers its range evenly") {
  const Philox random(3, RandomPurpose::kMockTokens, 1);
  std::array<int, 7> count{};
  for (uint64_t i = 0; i < 70000; ++i) ++count[random.below(i, 7)];
  for (const int n : count) CHECK(std::abs(n - 10000) < 500);
}

TEST_CASE("normal() follows the Box-Muller formula of the math library to the last digits") {
  const Philox random(11, RandomPurpose::kWeights, 42);
  double sum = 0;
  double squares = 0;
  double fourth = 0;
  constexpr int kCount = 200000;
  for (uint64_t i = 0; i < kCount; ++i) {
    const auto w = random.block(i);
    const double u = (static_cast<double>(((uint64_t{w[1]} << 32) | w[0]) >> 11) + 1.0) * 0x1p-53;
    const double t = static_cast<double>(((uint64_t{w[3]} << 32) | w[2]) >> 11) * 0x1p-53;
    const double x = random.normal(i);
    CHECK(std::abs(x - std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * t)) < 1e-13);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  CHECK(std::abs(sum / kCount) < 0.01);
  CHECK(squares / kCount == Approx(1.0).epsilon(0.01));
  CHECK(fourth / kCount == Approx(3.0).epsilon(0.03));
}
