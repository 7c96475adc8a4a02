#include "core/elementary.h"

#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace invar::elementary {
namespace {

// A number as a sum of two, the second of which is small beside the first.
struct Pair {
  double high = 0;
  double low = 0;
};

// a + b, exactly.
Pair sum_of(double a, double b) {
  const double sum = a + b;
  const double of_b = sum - a;
  return {sum, (a - (sum - of_b)) + (b - of_b)};
}

// a · b, exactly.
Pair product_of(double a, double b) {
  const double product = a * b;
  return {product, std::fma(a, b, -product)};
}

Pair operator*(const Pair& a, const Pair& b) {
  const Pair product = product_of(a.high, b.high);
  return sum_of(product.high, product.low + std::fma(a.high, b.low, a.low * b.high));
}

// Σ coefficients[k] · x^k.
template <size_t kTerms>
double polynomial(const std::array<double, kTerms>& coefficients, double x) {
  double sum = coefficients[kTerms - 1];
  for (size_t k = kTerms - 1; k-- > 0;) sum = std::fma(sum, x, coefficients[k]);
  return sum;
}

// ± 1 / n! of n = first, first + stride, ...; the factorials up to 18! are doubles.
template <size_t kTerms>
constexpr std::array<double, kTerms> inverse_factorials(int first, int stride, double sign) {
  std::array<double, kTerms> terms{};
  double factorial = 1.0;
  double signs = 1.0;
  for (int n = 1, next = first, k = 0; k < static_cast<int>(kTerms); ++n) {
    factorial *= n;
    if (n != next) continue;
    terms[static_cast<size_t>(k++)] = signs / factorial;
    signs *= sign;
    next += stride;
  }
  return terms;
}

// --- sine and cosine ---

constexpr double kLargestAngle = 0x1p30;
constexpr double kHalfPi[] = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54, -0x1.f1976b7ed8fbcp-110};

// angle = turns · π/2 + rest, |rest| ≤ π/4.
struct Reduced {
  int64_t turns = 0;
  Pair rest;
};

Reduced reduced(double angle) {
  INVAR_CHECK(std::abs(angle) <= kLargestAngle, "sine or cosine of {}, beyond ±2^30", angle);
  const double turns = std::nearbyint(angle * 0x1.45f306dc9c883p-1);
  const double first = std::fma(-turns, kHalfPi[0], angle);  // exact: a multiple of 2^-53 below 1
  const Pair second = product_of(turns, kHalfPi[1]);
  const Pair rest = sum_of(first, -second.high);
  return {static_cast<int64_t>(turns), sum_of(rest.high, std::fma(-turns, kHalfPi[2], rest.low - second.low))};
}

double sine_of(const Pair& x) {
  static constexpr auto kTerms = inverse_factorials<8>(3, 2, -1.0);  // from −x³/3! on, but for its sign
  const double square = x.high * x.high;
  const double rest = std::fma(-0.5 * square, x.low, x.low);
  return x.high + std::fma(-square * x.high, polynomial(kTerms, square), rest);
}

double cosine_of(const Pair& x) {
  static constexpr auto kTerms = inverse_factorials<8>(4, 2, -1.0);  // from x⁴/4! on
  const Pair square = product_of(x.high, x.high);
  const double near = std::fma(-0.5, square.high, 1.0);
  const double lost = std::fma(-0.5, square.high, 1.0 - near);
  const double rest = std::fma(-x.high, x.low, std::fma(-0.5, square.low, lost));
  return near + std::fma(square.high * square.high, polynomial(kTerms, square.high), rest);
}

// Of the angle and `quarters` more quarters of a turn.
double sine_after(double angle, int64_t quarters) {
  const Reduced at = reduced(angle);
  const int64_t quadrant = (at.turns + quarters) & 3;
  const double value = quadrant % 2 == 0 ? sine_of(at.rest) : cosine_of(at.rest);
  return quadrant < 2 ? value : -value;
}

// --- exponential and logarithm ---

constexpr Pair kLn2 = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
constexpr double kOneOverLn2 = 0x1.71547652b82fep+0;
// Beyond them 0 and inf.
constexpr double kLeastExponent = -746.0;
constexpr double kLargestExponent = 710.0;

double exp_of(const Pair& x) {
  if (std::isnan(x.high)) return x.high;
  if (x.high < kLeastExponent) return 0.0;
  if (x.high > kLargestExponent) return std::numeric_limits<double>::infinity();
  static constexpr auto kTerms = inverse_factorials<12>(2, 1, 1.0);  // from r²/2! on
  const double doublings = std::nearbyint(x.high * kOneOverLn2);
  const double first = std::fma(-doublings, kLn2.high, x.high);  // exact, as for angles
  const Pair r = sum_of(first, std::fma(-doublings, kLn2.low, x.low));
  const Pair one_and_r = sum_of(1.0, r.high);
  const double rest = std::fma(r.high * r.high, polynomial(kTerms, r.high), std::fma(r.high, r.low, r.low));
  return std::ldexp(one_and_r.high + (one_and_r.low + rest), static_cast<int>(doublings));
}

// Of a positive finite x = m 2^e: ln m = 2 artanh s = 2 (s + s³/3 + ...), s = (m − 1) / (m + 1), m in [√½, √2].
Pair log_of(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < 0x1.6a09e667f3bcdp-1) {
    m *= 2.0;
    --exponent;
  }
  const double difference = m - 1.0;  // exact
  const Pair sum = sum_of(m, 1.0);
  const double quotient = difference / sum.high;
  const double remainder = std::fma(-quotient, sum.high, difference) - quotient * sum.low;
  const Pair s = sum_of(quotient, remainder / sum.high);
  static constexpr std::array kTerms = {1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13, 1.0 / 15,
                                        1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23, 1.0 / 25};
  static constexpr Pair kThird = {0x1.5555555555555p-2, 0x1.5555555555555p-56};
  const Pair square = s * s;
  const Pair series = sum_of(kThird.high, std::fma(square.high, polynomial(kTerms, square.high), kThird.low));
  const Pair more = s * square * series;  // s³/3 + ...
  const Pair half = sum_of(s.high, more.high);
  const double rest = 2.0 * (half.low + s.low + more.low);
  const double e = exponent;
  const Pair of_exponent = product_of(e, kLn2.high);
  const Pair total = exponent == 0 ? Pair{2.0 * half.high, 0.0} : sum_of(of_exponent.high, 2.0 * half.high);
  return sum_of(total.high, total.low + (std::fma(e, kLn2.low, of_exponent.low) + rest));
}

}  // namespace

double sin(double angle) {
  return angle == 0.0 ? angle : sine_after(angle, 0);
}

double cos(double angle) {
  return sine_after(angle, 1);
}

double exp(double x) {
  return exp_of({x, 0.0});
}

double pow(double base, double exponent) {
  INVAR_CHECK(base >= 0.0 && std::isfinite(base), "a power of {}; the base must be finite and not negative", base);
  if (exponent == 0.0) return 1.0;
  if (base == 0.0) return exponent > 0 ? 0.0 : std::numeric_limits<double>::infinity();
  const Pair log = log_of(base);
  const Pair product = product_of(exponent, log.high);
  return exp_of(sum_of(product.high, std::fma(exponent, log.low, product.low)));
}

}  // namespace invar::elementary
