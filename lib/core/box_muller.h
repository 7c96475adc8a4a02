#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

// The Box-Muller transform on plain double arithmetic, so that the bits depend neither on a math library nor on the
// device: CPUs and GPUs call it. What includes this is compiled without contraction to fused multiply-adds.
namespace invar {
namespace detail {

// Natural logarithm of x in (0, 1], error below 1e-15: x = m 2^e, log m = 2 atanh((m - 1) / (m + 1)).
constexpr double log_of(double x) {
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
inline constexpr size_t kTerms = 9;
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

// Cosine of 2 pi t for t in [0, 1): reduced to an eighth of the circle, then Taylor series.
constexpr double cos_of_turn(double t) {
  const double quarter = t * 4.0;
  const auto quadrant = static_cast<int>(quarter);
  const double u = (quarter - quadrant) * 1.57079632679489661923;  // [0, pi/2)
  const bool flip = u > 0.78539816339744830962;
  const double v = flip ? 1.57079632679489661923 - u : u;  // [0, pi/4]
  const double v2 = v * v;
  // Not beside the function: code for GPUs reads no arrays of the host.
  constexpr auto kCosine = taylor(0);
  constexpr auto kSine = taylor(1);
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

}  // namespace detail

// √squared_radius · cosine is a standard normal number of two uniform ones, made of four random words.
struct RadiusAndCosine {
  double squared_radius;
  double cosine;
};
constexpr RadiusAndCosine box_muller(const std::array<uint32_t, 4>& words) {
  const uint64_t a = (uint64_t{words[1]} << 32) | words[0];
  const uint64_t b = (uint64_t{words[3]} << 32) | words[2];
  const double u = (static_cast<double>(a >> 11) + 1.0) * 0x1p-53;  // (0, 1]
  const double t = static_cast<double>(b >> 11) * 0x1p-53;          // [0, 1)
  return {-2.0 * detail::log_of(u), detail::cos_of_turn(t)};
}

}  // namespace invar
