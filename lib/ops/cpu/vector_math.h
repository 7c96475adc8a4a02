#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#endif

// Eight floats at a time, and the functions of one variable that the CPU operations need. They use only IEEE adds,
// multiplies and fused multiply-adds written as such, so the bits depend neither on the host's math library nor on
// what a compiler contracts.
namespace invar::ops::cpu {

using Float8 [[gnu::vector_size(32)]] = float;
using UInt32x8 [[gnu::vector_size(32)]] = uint32_t;

inline Float8 broadcast(float value) {
  return Float8{value, value, value, value, value, value, value, value};
}

inline Float8 load8(const float* from) {
  Float8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store8(float* to, Float8 value) {
  std::memcpy(to, &value, sizeof value);
}

// a · b + c, rounded once.
inline Float8 fma(Float8 a, Float8 b, Float8 c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  Float8 result;
  for (int i = 0; i < 8; ++i) result[i] = std::fma(a[i], b[i], c[i]);
  return result;
#endif
}

// The larger; b where either is NaN.
inline Float8 max(Float8 a, Float8 b) {
  return a > b ? a : b;
}

// e^x within 0.9 ulp; 0 below 2^-125.5 (no subnormal results), inf above the range, NaN of NaN. Cody and Waite's
// reduction x = n·ln 2 + r, |r| ≤ ln 2 / 2, and e^r = 1 + r·(1 + r·q(r)) with q of degree 4 fitted to the least
// relative error (4e-9).
inline Float8 exp(Float8 x) {
  const Float8 low = broadcast(-87.5f);
  const Float8 high = broadcast(89.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5·2^23 rounds to an integer and leaves it in the low bits.
  const Float8 magic = broadcast(0x1.8p23f);
  const Float8 shifted = fma(x, broadcast(0x1.715476p+0f), magic);
  const Float8 n = shifted - magic;
  Float8 r = fma(n, broadcast(-0x1.62e430p-1f), x);
  r = fma(n, broadcast(0x1.05c610p-29f), r);
  Float8 q = broadcast(0x1.6a1f62p-10f);
  q = fma(q, r, broadcast(0x1.123cccp-7f));
  q = fma(q, r, broadcast(0x1.555904p-5f));
  q = fma(q, r, broadcast(0x1.55548ep-3f));
  q = fma(q, r, broadcast(0x1.fffffcp-2f));
  const Float8 one = broadcast(1.0f);
  const Float8 power = fma(fma(q, r, one), r, one);
  // 2^(n-1) has an exponent field for every n of the clamped range; it is 0 for the least n.
  const UInt32x8 exponent = std::bit_cast<UInt32x8>(shifted) - std::bit_cast<UInt32x8>(magic) + 126;
  return (power + power) * std::bit_cast<Float8>(exponent << 23);
}

// tanh x within 1.5 ulp, odd to the bit. Up to 0.625 an odd polynomial x + x³·p(x²), fitted to the least relative
// error; beyond it 1 − 2/(e^2|x| + 1) has nothing to cancel.
inline Float8 tanh(Float8 x) {
  const UInt32x8 sign = std::bit_cast<UInt32x8>(x) & 0x80000000u;
  const Float8 magnitude = std::bit_cast<Float8>(std::bit_cast<UInt32x8>(x) ^ sign);
  const Float8 z = magnitude * magnitude;
  Float8 p = broadcast(-0x1.75d1f4p-8f);
  p = fma(p, z, broadcast(0x1.522176p-6f));
  p = fma(p, z, broadcast(-0x1.b83b2ep-5f));
  p = fma(p, z, broadcast(0x1.110718p-3f));
  p = fma(p, z, broadcast(-0x1.555532p-2f));
  const Float8 near = fma(magnitude * z, p, magnitude);
  const Float8 one = broadcast(1.0f);
  const Float8 far = one - broadcast(2.0f) / (exp(magnitude + magnitude) + one);
  const Float8 y = magnitude < broadcast(0.625f) ? near : far;
  return std::bit_cast<Float8>(std::bit_cast<UInt32x8>(y) | sign);  // the sign apart, for −0
}

// ln x of a positive normal x, correct to the last bit but for rare ties: ln m = 2·atanh((m-1)/(m+1)) in fp64,
// m in [√½, √2].
inline float log(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (!(x > 0.0f) || bits >= 0x7f800000u) return x > 0.0f ? x : (x == 0.0f ? -INFINITY : NAN);
  // 0x3504f3 is the mantissa of √2: above it the exponent counts one more.
  const int exponent = static_cast<int>((bits - 0x3f3504f3u + 0x3f800000u) >> 23) - 127;
  const double m = std::bit_cast<float>(bits - (static_cast<uint32_t>(exponent) << 23));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 13;
  for (int odd = 11; odd >= 3; odd -= 2) series = std::fma(series, z, 1.0 / odd);
  const double log_m = 2.0 * std::fma(series * z, s, s);
  return static_cast<float>(std::fma(static_cast<double>(exponent), 0x1.62e42fefa39efp-1, log_m));
}

}  // namespace invar::ops::cpu
