#include "core/philox.h"

#include <bit>
#include <cmath>

namespace invar {
namespace {

// Natural logarithm of x in (0, 1], error below 1e-15: x = m 2^e, log m = 2 atanh((m - 1) / (m + 1)).
double log_of(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  auto exponent = static_cast<int>((bits >> 52) & 0x7ff) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double series = 0.0;
  for (int k = 21; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
  return 2.0 * s * series + exponent * 0.69314718055994530942;
}

// Taylor coefficients (−1)^k / (2k)! and (−1)^k / (2k + 1)!: below 1e-17 of the value on [0, pi/4].
constexpr size_t kTerms = 9;
constexpr std::array<double, kTerms> taylor(int first) {
  std::array<double, kTerms> coefficients{};
  double factorial = 1.0;
  int n = first;
  for (size_t k = 0; k < kTerms; ++k) {
    coefficients[k] = (k % 2 == 0 ? 1.0 : -1.0) / factorial;
    factorial *= (n + 1) * (n + 2);
    n += 2;
  }
  return coefficients;
}
constexpr auto kCosine = taylor(0);
constexpr auto kSine = taylor(1);

// Cosine of 2 pi t for t in [0, 1): reduced to an eighth of the circle, then Taylor series.
double cos_of_turn(double t) {
  const double quarter = t * 4.0;
  const auto quadrant = static_cast<int>(quarter);
  const double u = (quarter - quadrant) * 1.57079632679489661923;  // [0, pi/2)
  const bool flip = u > 0.78539816339744830962;
  const double v = flip ? 1.57079632679489661923 - u : u;  // [0, pi/4]
  const double v2 = v * v;
  double c = 0.0;
  double s = 0.0;
  for (size_t k = kTerms; k-- > 0;) {
    c = c * v2 + kCosine[k];
    s = s * v2 + kSine[k];
  }
  s *= v;
  const double cosine = flip ? s : c;  // of u
  const double sine = flip ? c : s;
  switch (quadrant) {
    case 0:
      return cosine;
    case 1:
      return -sine;
    case 2:
      return -cosine;
    default:
      return sine;
  }
}

}  // namespace

Philox::Philox(uint64_t seed, RandomPurpose purpose, uint64_t stream) {
  key_ = {static_cast<uint32_t>(seed),
          static_cast<uint32_t>(seed >> 32) ^ (static_cast<uint32_t>(purpose) * 0x85ebca6bu)};
  high_counter_ = {static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
}

std::array<uint32_t, 4> Philox::block(uint64_t index) const {
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

uint64_t Philox::bits64(uint64_t index) const {
  const auto words = block(index);
  return (uint64_t{words[1]} << 32) | words[0];
}

uint64_t Philox::below(uint64_t index, uint64_t bound) const {
  // 128-bit multiply-shift; the bias of at most bound / 2^64 is far below anything a run can see.
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits64(index)) * bound) >> 64);
}

double Philox::normal(uint64_t index) const {
  const auto words = block(index);
  const uint64_t a = (uint64_t{words[1]} << 32) | words[0];
  const uint64_t b = (uint64_t{words[3]} << 32) | words[2];
  const double u = (static_cast<double>(a >> 11) + 1.0) * 0x1p-53;  // (0, 1]
  const double t = static_cast<double>(b >> 11) * 0x1p-53;          // [0, 1)
  return std::sqrt(-2.0 * log_of(u)) * cos_of_turn(t);              // Box-Muller
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
