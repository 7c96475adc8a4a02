#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace invar {

// The sum of doubles without rounding: a fixed-point number wide enough for all of them, rounded once at the end. So it
// depends neither on the order of its terms nor on how they are spread over ranks, whose digits are added as integers.
class ExactSum {
 public:
  void add(double term);
  // All terms of another sum.
  void add(const ExactSum& sum);

  // Rounded to nearest, ties to even. NaN if a term was NaN or infinities of both signs met.
  double value() const;

  // A sum over ranks: the element-wise integer sum of all ranks' digits, of up to 2^30 of them, is that of all terms.
  static constexpr int kDigits = 72;
  std::array<int64_t, kDigits> digits() const;
  static ExactSum of_digits(std::span<const int64_t, kDigits> digits);

 private:
  // Digit i counts 2^(32 i - 1074). The last three count infinities and what is not a number.
  static constexpr int kFixedPoint = kDigits - 3;
  static constexpr int kPositiveInfinity = kFixedPoint;
  static constexpr int kNegativeInfinity = kFixedPoint + 1;
  static constexpr int kNotANumber = kFixedPoint + 2;
  void carry();

  std::array<int64_t, kDigits> digits_{};
  int64_t added_ = 0;  // since the last carry
};

}  // namespace invar
