#include "app/tensor_core_step.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>

#include "core/error.h"

namespace invar::app {
namespace {

constexpr size_t kMostTerms = 33;

// ±significand · 2^(exponent − fraction_bits): a number whose leading bit, but for products from 2 to 4, has the
// exponent.
struct Term {
  int64_t significand = 0;
  int exponent = 0;
  int fraction_bits = 0;
};

Term term_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value == 0.0f) return {};
  const auto significand = static_cast<int64_t>((bits & 0x007f'ffffu) | 0x0080'0000u);
  return {std::signbit(value) ? -significand : significand, static_cast<int>(bits >> 23 & 0xffu) - 127, 23};
}

// Of two bf16 numbers: 8 bits of significand each.
Term product_of(float a, float b) {
  const Term left = term_of(a);
  const Term right = term_of(b);
  constexpr int64_t kBelowBf16 = int64_t{1} << 16;
  return {left.significand / kBelowBf16 * (right.significand / kBelowBf16), left.exponent + right.exponent, 14};
}

// In units of 2^(largest − fraction), toward zero.
int64_t cut_off(const Term& term, int largest, int fraction) {
  const int shift = fraction - term.fraction_bits - (largest - term.exponent);
  if (shift <= -63) return 0;
  return shift >= 0 ? term.significand * (int64_t{1} << shift) : term.significand / (int64_t{1} << -shift);
}

}  // namespace

float tensor_core_step(float sum, std::span<const float> a, std::span<const float> b, int fraction) {
  INVAR_CHECK(a.size() == b.size() && a.size() < kMostTerms && fraction <= 30, "{} and {} factors, F = {}", a.size(),
              b.size(), fraction);
  std::array<Term, kMostTerms> terms{term_of(sum)};
  for (size_t i = 0; i < a.size(); ++i) terms[i + 1] = product_of(a[i], b[i]);
  const std::span<const Term> used(terms.data(), a.size() + 1);
  bool any = false;
  int largest = 0;
  for (const Term& term : used) {
    if (term.significand == 0) continue;
    largest = any ? std::max(largest, term.exponent) : term.exponent;
    any = true;
  }
  int64_t total = 0;
  for (const Term& term : used) total += cut_off(term, largest, fraction);
  const auto magnitude = static_cast<uint64_t>(std::abs(total));
  const int beyond = std::max(0, static_cast<int>(std::bit_width(magnitude)) - 24);  // bits that fp32 has no place for
  const auto kept = static_cast<double>(magnitude >> beyond << beyond);
  return static_cast<float>(std::ldexp(total < 0 ? -kept : kept, largest - fraction));
}

}  // namespace invar::app
