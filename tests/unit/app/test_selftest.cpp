#include "app/selftest.h"

#include <cmath>
#include <set>

#include "app/tensor_core_step.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

Trajectory made_up_trajectory() {
  Trajectory trajectory;
  for (uint64_t step = 0; step < 3; ++step) {
    trajectory.push_back({{10 + step, 20 + step, 30 + step, 40 + step}, 50 + step});
  }
  return trajectory;
}

float step(float sum, const std::vector<float>& a, const std::vector<float>& b, int fraction) {
  return tensor_core_step(sum, a, b, fraction);
}

}  // namespace

TEST_CASE("selftest: bits are equal or the first difference is told") {
  const Bits bits = {0x3f800000, 0x80000000, 0x7fc00001};
  CHECK(difference(bits, bits).empty());
  Bits altered = bits;
  altered[1] = 0;  // +0 for −0
  CHECK(difference(altered, bits) == "1 of 3 elements, first 1: 00000000, expected 80000000");
  altered[2] = 0x7fc00000;  // another NaN
  CHECK(difference(altered, bits) == "2 of 3 elements, first 1: 00000000, expected 80000000");
  altered.pop_back();
  CHECK(difference(altered, bits) == "2 elements, expected 3");
}

TEST_CASE("selftest: trajectories are equal or the first step and its kinds are told") {
  const Trajectory one = made_up_trajectory();
  CHECK(difference(one, one).empty());
  Trajectory altered = one;
  altered[1].kinds[0] ^= 1;
  altered[1].kinds[3] ^= 1;
  altered[1].combined ^= 1;
  altered[2].combined ^= 1;
  CHECK(difference(altered, one) == "step 2: weights, gradients");
  altered = one;
  altered[2].combined ^= 1;
  CHECK(difference(altered, one) == "step 3: loss or gradient norm");
  altered.pop_back();
  CHECK(difference(altered, one) == "2 steps, expected 3");
}

TEST_CASE("selftest: what differs or throws is a failure") {
  SelftestReport report;
  report.check("equal", [] { return std::string(); });
  CHECK(report.failed() == 0);
  report.check("different", [] { return difference(Bits{1}, Bits{2}); });
  CHECK(report.failed() == 1);
  report.check("refused", []() -> std::string { throw Error(ErrorKind::kFault, "no algorithm"); });
  CHECK(report.failed() == 2);
  report.tell("told", "text");
  CHECK(report.checks() == 3);
}

TEST_CASE("selftest: random floats have the exponents that are asked for") {
  int negative = 0;
  std::set<int> exponents;
  for (int64_t i = 0; i < 2000; ++i) {
    const float value = random_float(3, i, 2, -66);
    negative += std::signbit(value) ? 1 : 0;
    exponents.insert(std::ilogb(value));
    CHECK(value == random_float(3, i, 2, -66));
  }
  CHECK(exponents == std::set<int>{-68, -67, -66, -65, -64});
  CHECK(std::abs(negative - 1000) < 150);
}

TEST_CASE("selftest: parts of a matrix and its transpose") {
  const Matrix all(4, 6, 1, 3);
  const Matrix part = all.part({1, 3}, {2, 6});
  CHECK(part.rows == 2);
  CHECK(part.cols == 4);
  CHECK(part.at(1, 3) == all.at(2, 5));
  CHECK(part.transposed().at(3, 1) == all.at(2, 5));
  CHECK(all.rounded(DType::kBF16).at(0, 0) == static_cast<float>(BF16(all.at(0, 0))));
}

TEST_CASE("a tensor core's step cuts each term off below the largest exponent") {
  const float quarter_ulp = 0x1p-25f;
  // 1 + 4 · 2^-25: with F = 25 the terms are there.
  const std::vector<float> a = {1, 0x1p-12f, 0x1p-12f, 0x1p-12f, 0x1p-12f};
  const std::vector<float> b = {1, 0x1p-13f, 0x1p-13f, 0x1p-13f, 0x1p-13f};
  CHECK(step(0, a, b, 25) == 1 + 0x1p-23f);
  CHECK(step(0, a, b, 24) == 1);
  // The sum takes part like a product, ...
  CHECK(step(1, {quarter_ulp, quarter_ulp, quarter_ulp, quarter_ulp}, {1, 1, 1, 1}, 25) == 1 + 0x1p-23f);
  CHECK(step(0x1p30f, {1, 1}, {1, 31}, 25) == 0x1p30f);
  CHECK(step(0x1p-30f, {1, -1}, {1, 1}, 25) == 0);
  // ... each is cut off toward zero, and so is the result.
  CHECK(step(1, {-0x1p-26f}, {1}, 25) == 1);
  CHECK(step(1, {-0x1p-25f}, {1}, 25) == 1 - 0x1p-24f);
  CHECK(step(1, {3 * quarter_ulp}, {1}, 25) == 1);
  CHECK(step(-1, {-3 * quarter_ulp}, {1}, 25) == -1);
}

TEST_CASE("a tensor core's step cancels exactly and counts a product by its factors' exponents") {
  CHECK(step(-1, {1, 0x1p-10f}, {1, 0x1p-10f}, 25) == 0x1p-20f);
  CHECK(step(0, {0, 0}, {3, 0}, 25) == 0);
  CHECK(step(0, {3}, {5}, 25) == 15);
  // 1.5 · 1.5 > 2, yet its exponent is 0: 8 · 2^-25 are not lost.
  const std::vector<float> small(8, 0x1p-25f);
  std::vector<float> a = {1.5f}, b = {1.5f};
  a.insert(a.end(), small.begin(), small.end());
  b.insert(b.end(), 8, 1.0f);
  CHECK(step(0, a, b, 25) == 2.25f + 0x1p-22f);
  CHECK(step(0, a, b, 24) == 2.25f);
}
