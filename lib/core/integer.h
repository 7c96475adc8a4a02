#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace invar {

// a / b rounded up, for a >= 0 and b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The least multiple of b that is a or more.
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// The product of the factors, or nothing if it or a product on the way exceeds int64_t.
constexpr std::optional<int64_t> checked_product(std::span<const int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return std::nullopt;
  }
  return result;
}

}  // namespace invar
