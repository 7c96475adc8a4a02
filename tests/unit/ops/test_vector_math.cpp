#include "ops/cpu/vector_math.h"

#include "support/catch.h"

namespace invar::ops::cpu {
namespace {

float exp_of(float x) {
  return exp(broadcast(x))[0];
}

float tanh_of(float x) {
  return tanh(broadcast(x))[0];
}

// |actual - exact| in units of the last place of the exact value.
double ulps(float actual, double exact) {
  const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
  return std::abs(static_cast<double>(actual) - exact) / unit;
}

TEST_CASE("exp is within 0.9 ulp over its range") {
  double worst = 0;
  for (float x = -86.9f; x < 88.7f; x += 0.000213f) {
    worst = std::max(worst, ulps(exp_of(x), std::exp(static_cast<double>(x))));
  }
  for (float x = 1e-30f; x < 1.0f; x *= 1.07f) {
    worst = std::max(worst, ulps(exp_of(x), std::exp(static_cast<double>(x))));
    worst = std::max(worst, ulps(exp_of(-x), std::exp(-static_cast<double>(x))));
  }
  CHECK(worst < 0.9);
  CHECK(worst > 0.5);  // else nothing was measured
}

TEST_CASE("exp at the ends of its range") {
  CHECK(exp_of(0.0f) == 1.0f);
  CHECK(exp_of(-88.0f) == 0.0f);
  CHECK(exp_of(-1e30f) == 0.0f);
  CHECK(exp_of(-INFINITY) == 0.0f);
  CHECK(exp_of(88.722f) < INFINITY);
  CHECK(exp_of(88.73f) == INFINITY);
  CHECK(exp_of(INFINITY) == INFINITY);
  CHECK(std::isnan(exp_of(NAN)));
}

TEST_CASE("exp gives each lane its own value") {
  const Float8 x{-3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f};
  const Float8 y = exp(x);
  for (int lane = 0; lane < 8; ++lane) CHECK(y[lane] == exp_of(x[lane]));
}

TEST_CASE("tanh is within 1.5 ulp, and odd") {
  double worst = 0;
  int64_t even = 0;
  const auto check = [&](float x) {
    worst = std::max(worst, ulps(tanh_of(x), std::tanh(static_cast<double>(x))));
    even += tanh_of(-x) != -tanh_of(x);
  };
  for (float x = 0.5f; x < 0.75f; x += 0x1p-22f) check(x);  // where one formula gives way to the other
  for (float x = 1e-4f; x < 10.0f; x += 0.0000213f) check(x);
  for (float x = 1.2e-38f; x < 1.0f; x *= 1.003f) check(x);
  CHECK(worst < 1.5);
  CHECK(worst > 0.5);  // else nothing was measured
  CHECK(even == 0);
}

TEST_CASE("tanh at the ends of its range") {
  for (const float x : {9.5f, 20.0f, 44.0f, 45.0f, 100.0f, 1e30f, INFINITY}) {
    CHECK(tanh_of(x) == 1.0f);
    CHECK(tanh_of(-x) == -1.0f);
  }
  CHECK(tanh_of(8.9f) < 1.0f);
  CHECK((tanh_of(0.0f) == 0.0f && !std::signbit(tanh_of(0.0f))));
  CHECK((tanh_of(-0.0f) == 0.0f && std::signbit(tanh_of(-0.0f))));
  CHECK(tanh_of(1e-45f) == 1e-45f);  // the least subnormal
  CHECK(tanh_of(-1e-39f) == -1e-39f);
  CHECK(std::isnan(tanh_of(NAN)));
  CHECK(std::isnan(tanh_of(-NAN)));
}

TEST_CASE("tanh gives each lane its own value") {
  const Float8 x{-3.0f, -0.7f, -0.1f, 0.0f, 0.2f, 0.63f, NAN, INFINITY};
  const Float8 y = tanh(x);
  for (const int lane : {0, 1, 2, 3, 4, 5, 7}) CHECK(y[lane] == tanh_of(x[lane]));
  CHECK(std::isnan(y[6]));
}

TEST_CASE("log is the correctly rounded one but for rare ties") {
  int64_t wrong = 0;
  int64_t count = 0;
  const auto check = [&](float x) {
    ++count;
    wrong += log(x) != static_cast<float>(std::log(static_cast<double>(x)));
  };
  for (float x = 1.2e-38f; x < 3e38f; x *= 1.0003f) check(x);
  for (float x = 0.5f; x < 2.0f; x += 0x1p-20f) check(x);
  CHECK(count > 500000);
  CHECK(wrong * 100000 < count);
}

TEST_CASE("log at the ends of its range") {
  CHECK(log(1.0f) == 0.0f);
  CHECK(log(0.0f) == -INFINITY);
  CHECK(log(INFINITY) == INFINITY);
  CHECK(std::isnan(log(-1.0f)));
  CHECK(std::isnan(log(NAN)));
}

TEST_CASE("max keeps the second operand where either is NaN") {
  CHECK(max(broadcast(1.0f), broadcast(2.0f))[3] == 2.0f);
  CHECK(max(broadcast(2.0f), broadcast(1.0f))[3] == 2.0f);
  CHECK(max(broadcast(NAN), broadcast(1.0f))[3] == 1.0f);
}

}  // namespace
}  // namespace invar::ops::cpu
