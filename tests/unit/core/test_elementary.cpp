#include "core/elementary.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "support/catch.h"

using namespace invar;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// |actual − exact| in units of the last place of the exact value, which has 11 bits more.
double ulps(double actual, long double exact) {
  const long double unit = std::ldexp(1.0L, std::max(std::ilogb(exact), -1022) - 52);
  return static_cast<double>(std::abs(static_cast<long double>(actual) - exact) / unit);
}

// The largest of many errors.
class Worst {
 public:
  void add(double actual, long double exact) {
    const double error = ulps(actual, exact);
    if (!(error <= worst_)) worst_ = error;  // NaN stays
  }
  void check(double bound) const {
    CHECK(worst_ < bound);
    CHECK(worst_ > 0.45);  // else nothing was measured
  }

 private:
  double worst_ = 0;
};

}  // namespace

TEST_CASE("sine and cosine are within 0.8 ulp") {
  Worst sine, cosine;
  const auto check = [&](double x) {
    for (const double angle : {x, -x}) {
      sine.add(elementary::sin(angle), std::sin(static_cast<long double>(angle)));
      cosine.add(elementary::cos(angle), std::cos(static_cast<long double>(angle)));
    }
  };
  for (double x = 0x1p-1022; x < 0x1p30; x *= 1.0037) check(x);
  for (double x = 0; x < 10; x += 0.0000713) check(x);
  // Beside multiples of π/4, where the reduction cancels and the quadrant changes.
  for (int n = 1; n < 20000; ++n) {
    const double near = n * 0x1.921fb54442d18p-1;
    for (const double x : {std::nextafter(near, 0.0), near, std::nextafter(near, kInf)}) check(x);
    check(static_cast<double>(static_cast<float>(near)));
  }
  sine.check(0.8);
  cosine.check(0.8);
}

TEST_CASE("sine and cosine at special values") {
  CHECK(elementary::cos(0.0) == 1.0);
  CHECK((elementary::sin(0.0) == 0.0 && !std::signbit(elementary::sin(0.0))));
  CHECK((elementary::sin(-0.0) == 0.0 && std::signbit(elementary::sin(-0.0))));
  CHECK(elementary::sin(5e-324) == 5e-324);
  for (const double angle : {0x1.000002p30, -kInf, std::nan("")}) {
    CHECK_THROWS_AS(elementary::sin(angle), Error);
    CHECK_THROWS_AS(elementary::cos(angle), Error);
  }
}

TEST_CASE("the exponential is within 0.8 ulp, and 1 ulp of a subnormal number") {
  Worst normal;
  for (double x = -708.3; x < 709.78; x += 0.000713)
    normal.add(elementary::exp(x), std::exp(static_cast<long double>(x)));
  for (double x = 0x1p-1022; x < 1; x *= 1.0037) {
    normal.add(elementary::exp(x), std::exp(static_cast<long double>(x)));
    normal.add(elementary::exp(-x), std::exp(-static_cast<long double>(x)));
  }
  normal.check(0.8);
  Worst subnormal;
  for (double x = -745.1; x < -708.4; x += 0.00713)
    subnormal.add(elementary::exp(x), std::exp(static_cast<long double>(x)));
  subnormal.check(1.0);
}

TEST_CASE("the exponential at the ends of its range") {
  CHECK(elementary::exp(0.0) == 1.0);
  CHECK(elementary::exp(-0.0) == 1.0);
  CHECK(elementary::exp(709.782712893384) < kInf);
  CHECK(elementary::exp(709.782712893385) == kInf);
  CHECK(elementary::exp(-745.13321910194) > 0.0);
  for (const double x : {-745.1332191019412, -746.5, -1e300, -kInf}) CHECK(elementary::exp(x) == 0.0);
  for (const double x : {711.0, 1e300, kInf}) CHECK(elementary::exp(x) == kInf);
  CHECK(std::isnan(elementary::exp(std::nan(""))));
}

TEST_CASE("powers are within 0.8 ulp") {
  Worst worst;
  const auto check = [&](double base, double exponent) {
    const long double exact = std::pow(static_cast<long double>(base), static_cast<long double>(exponent));
    if (exact > 1e-307L && exact < 1e308L) worst.add(elementary::pow(base, exponent), exact);
  };
  for (const double theta : {1e4, 1e6, 5e6}) {
    for (int i = 0; i < 4096; ++i) check(theta, -i / 4096.0);
  }
  for (const float beta : {0.5f, 0.9f, 0.95f, 0.98f, 0.99f, 0.999f, 0.9999f}) {
    for (int step = 1; step < 20000; ++step) check(static_cast<double>(beta), step);
  }
  for (double base = 0x1p-1060; base < 1e308; base *= 1.37) {
    for (const double exponent : {-1.7, -0.013, 0.37, 1.0, 2.9}) check(base, exponent);
  }
  for (double away = 0x1p-52; away < 1; away *= 1.037) {
    for (const double exponent : {-1e5, -3.0, 0.1, 1e3}) {
      check(1 + away, exponent);
      check(1 - away / 2, exponent);
    }
  }
  worst.check(0.8);
}

TEST_CASE("powers at special values") {
  CHECK(elementary::pow(0.9, 1.0) == 0.9);
  CHECK(elementary::pow(3.0, 4.0) == 81.0);
  CHECK(elementary::pow(2.0, -1074.0) == 0x1p-1074);
  CHECK(elementary::pow(1.0, 1e300) == 1.0);
  for (const double base : {0.0, 0.5, 1e300}) CHECK(elementary::pow(base, 0.0) == 1.0);
  CHECK(elementary::pow(0.0, 3.0) == 0.0);
  CHECK(elementary::pow(0.0, -3.0) == kInf);
  CHECK(elementary::pow(0.999, 1e9) == 0.0);
  CHECK(elementary::pow(0.999, -1e9) == kInf);
  for (const double base : {-1.0, kInf, std::nan("")}) CHECK_THROWS_AS(elementary::pow(base, 2.0), Error);
}
