#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace invar::app {

// How far a number may lie from the one it is compared with.
struct Tolerance {
  double atol = 1e-6;
  double rtol = 1e-4;
  bool exact = false;       // bits must be equal: −0 is not +0, a NaN only the same NaN
  double norm_rtol = 1e-4;  // rtol of grad_norm in metrics

  double band(double magnitude) const { return exact ? 0 : atol + rtol * magnitude; }
  double norm_band(double magnitude) const { return exact ? 0 : atol + norm_rtol * magnitude; }
};

enum class Verdict : uint8_t {
  kEqual,  // to the bit
  kInside,
  kOutside,
};

inline bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

// |a − b|. What is not finite on one side is infinitely far from everything but its like: NaN from NaN is 0.
inline double difference(double a, double b) {
  if (std::isfinite(a) && std::isfinite(b)) return std::abs(a - b);
  return a == b || (std::isnan(a) && std::isnan(b)) ? 0 : std::numeric_limits<double>::infinity();
}

inline bool is_outside(double a, double b, double band, bool exact) {
  return exact ? !same_bits(a, b) : difference(a, b) > band;
}

}  // namespace invar::app
