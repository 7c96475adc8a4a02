#include "core/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "support/catch.h"

using namespace invar;

namespace {

double exact(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double term : terms) sum.add(term);
  return sum.value();
}

bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// Shewchuk's sum by growing expansions, another way to the same number; without overflow on the way.
double by_expansion(const std::vector<double>& terms) {
  std::vector<double> partials;
  for (double x : terms) {
    std::vector<double> kept;
    for (double y : partials) {
      if (std::abs(x) < std::abs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) kept.push_back(low);
      x = high;
    }
    kept.push_back(x);
    partials = std::move(kept);
  }
  double sum = 0, low = 0;
  size_t i = partials.size();
  while (i > 0) {
    const double x = sum, y = partials[--i];
    sum = x + y;
    low = y - (sum - x);
    if (low != 0) break;
  }
  // Half-way cases: what is left below decides.
  if (i > 0 && ((low < 0 && partials[i - 1] < 0) || (low > 0 && partials[i - 1] > 0))) {
    const double twice = low * 2, up = sum + twice;
    if (twice == up - sum) sum = up;
  }
  return sum;
}

std::vector<double> wide_terms(uint32_t seed, int count, int exponents) {
  std::mt19937_64 random(seed);
  std::vector<double> terms;
  for (int i = 0; i < count; ++i) {
    const double mantissa = 1.0 + static_cast<double>(random() >> 12) * 0x1p-52;
    const int exponent = static_cast<int>(random() % static_cast<uint64_t>(2 * exponents + 1)) - exponents;
    terms.push_back(std::ldexp(random() % 2 == 0 ? mantissa : -mantissa, exponent));
  }
  return terms;
}

}  // namespace

TEST_CASE("sums of sums are the sum of all terms") {
  const std::vector<double> terms = wide_terms(11, 4000, 600);
  ExactSum all;
  for (size_t first = 0; first < terms.size(); first += 70) {
    ExactSum part;
    for (size_t i = first; i < std::min(terms.size(), first + 70); ++i) part.add(terms[i]);
    all.add(part);
  }
  CHECK(same_bits(all.value(), exact(terms)));
  ExactSum broken;
  broken.add(std::numeric_limits<double>::infinity());
  all.add(broken);
  CHECK(std::isinf(all.value()));
}

TEST_CASE("an exact sum of a few terms") {
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  constexpr double kLargest = std::numeric_limits<double>::max();
  CHECK(same_bits(exact({}), 0.0));
  CHECK(same_bits(exact({-0.0}), 0.0));
  CHECK(same_bits(exact({1.5, -1.5}), 0.0));
  CHECK(exact({1e308, 1.0, -1e308}) == 1.0);
  CHECK(exact({1.0, 0x1p-53}) == 1.0);                      // half-way, to even
  CHECK(exact({1.0, 0x1p-53, kTiny}) == 1.0 + 0x1p-52);     // just above
  CHECK(exact({1.0 + 0x1p-52, 0x1p-53}) == 1.0 + 0x1p-51);  // half-way, to even
  CHECK(exact({-1.0, -0x1p-53, -kTiny}) == -1.0 - 0x1p-52);
  CHECK(exact({1.0, -kTiny}) == 1.0);
  CHECK(exact({kTiny, kTiny, kTiny}) == 3 * kTiny);
  CHECK(exact({kLargest, kLargest, -kLargest}) == kLargest);
  CHECK(exact({kLargest, kLargest}) == std::numeric_limits<double>::infinity());
  CHECK(exact({-kLargest, kTiny}) == -kLargest);
}

TEST_CASE("an exact sum is the sum that another algorithm finds, in any order") {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::vector<double> terms =
        wide_terms(seed, 1 + static_cast<int>(seed * 7 % 200), static_cast<int>(seed % 5) * 120);
    const double expected = by_expansion(terms);
    CHECK(exact(terms) == expected);
    std::shuffle(terms.begin(), terms.end(), std::mt19937(seed));
    CHECK(exact(terms) == expected);
  }
}

TEST_CASE("the digits of ranks add up to the sum of all terms; doubles do not") {
  const std::vector<double> terms = wide_terms(5, 4000, 40);
  const double whole = exact(terms);
  int differ = 0;
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    std::array<int64_t, ExactSum::kDigits> total{};
    double rounded = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      ExactSum own;
      double own_rounded = 0;
      for (size_t i = terms.size() * rank / ranks; i < terms.size() * (rank + 1) / ranks; ++i) {
        own.add(terms[i]);
        own_rounded += terms[i];
      }
      const auto digits = own.digits();
      for (size_t i = 0; i < digits.size(); ++i) total[i] += digits[i];
      rounded += own_rounded;
    }
    CHECK(same_bits(ExactSum::of_digits(total).value(), whole));
    differ += !same_bits(rounded, whole);
  }
  CHECK(differ >= 7);
}

TEST_CASE("what is not finite is seen in an exact sum") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK(exact({1.0, kInfinity, -5.0}) == kInfinity);
  CHECK(exact({-kInfinity, 1e308}) == -kInfinity);
  CHECK(std::isnan(exact({kInfinity, -kInfinity})));
  CHECK(std::isnan(exact({1.0, std::nan(""), kInfinity})));
}
