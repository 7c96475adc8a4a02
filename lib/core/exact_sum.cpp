#include "core/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace invar {
namespace {

constexpr int kDigitBits = 32;
constexpr int64_t kBase = int64_t{1} << kDigitBits;
constexpr int kMantissaBits = 52;
constexpr int64_t kMostAdded = int64_t{1} << 30;  // a digit grows by less than 2^32 each time

}  // namespace

void ExactSum::add(double term) {
  const auto bits = std::bit_cast<uint64_t>(term);
  const bool negative = bits >> 63 != 0;
  const auto exponent = static_cast<int>(bits >> kMantissaBits & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << kMantissaBits) - 1);
  if (exponent == 0x7ff) {
    ++digits_[static_cast<size_t>(mantissa != 0 ? kNotANumber : negative ? kNegativeInfinity : kPositiveInfinity)];
    return;
  }
  if (exponent != 0) mantissa |= uint64_t{1} << kMantissaBits;
  const int position = exponent == 0 ? 0 : exponent - 1;  // of the lowest bit
  const auto first = static_cast<size_t>(position / kDigitBits);
  const int shift = position % kDigitBits;
  const uint64_t low = (mantissa & (kBase - 1)) << shift;
  const uint64_t high = (mantissa >> kDigitBits) << shift;
  const std::array<uint64_t, 3> parts = {low & (kBase - 1), (low >> kDigitBits) + (high & (kBase - 1)),
                                         high >> kDigitBits};
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto part = static_cast<int64_t>(parts[i]);
    digits_[first + i] += negative ? -part : part;
  }
  if (++added_ == kMostAdded / 2) carry();  // the middle part may be twice as large
}

void ExactSum::add(const ExactSum& sum) {
  const std::array<int64_t, kDigits> digits = sum.digits();
  for (size_t i = 0; i < digits.size(); ++i) digits_[i] += digits[i];
  if (++added_ == kMostAdded / 2) carry();
}

// Brings every digit but the highest to 0 ... 2^32 - 1.
void ExactSum::carry() {
  for (size_t i = 0; i + 1 < kFixedPoint; ++i) {
    const int64_t up = digits_[i] >> kDigitBits;  // rounds down
    digits_[i] -= up * kBase;
    digits_[i + 1] += up;
  }
  added_ = 0;
}

std::array<int64_t, ExactSum::kDigits> ExactSum::digits() const {
  ExactSum carried = *this;
  carried.carry();
  return carried.digits_;
}

ExactSum ExactSum::of_digits(std::span<const int64_t, kDigits> digits) {
  ExactSum sum;
  std::copy(digits.begin(), digits.end(), sum.digits_.begin());
  sum.carry();
  return sum;
}

double ExactSum::value() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const bool up = digits_[kPositiveInfinity] > 0;
  const bool down = digits_[kNegativeInfinity] > 0;
  if (digits_[kNotANumber] > 0 || (up && down)) return std::numeric_limits<double>::quiet_NaN();
  if (up || down) return up ? kInfinity : -kInfinity;

  ExactSum magnitude = *this;
  magnitude.carry();
  const bool negative = magnitude.digits_[kFixedPoint - 1] < 0;
  if (negative) {
    for (size_t i = 0; i < kFixedPoint; ++i) magnitude.digits_[i] = -magnitude.digits_[i];
    magnitude.carry();
  }
  int top = kFixedPoint - 1;
  while (top > 0 && magnitude.digits_[static_cast<size_t>(top)] == 0) --top;
  // The highest 54 bits or more, the lowest of which also stands for all that are lower: rounding to 53 sees enough.
  uint64_t head = 0;
  int position = kDigitBits * (top + 1);  // of the lowest bit of head
  int digit = top;
  for (; digit >= 0 && head < uint64_t{1} << (kMantissaBits + 2); --digit) {
    const auto next = static_cast<uint64_t>(magnitude.digits_[static_cast<size_t>(digit)]);
    const int room = std::countl_zero(head | 1);
    const int take = head == 0 ? kDigitBits : std::min(kDigitBits, room);
    head = head << take | next >> (kDigitBits - take);
    position -= take;
    const uint64_t rest = take == kDigitBits ? 0 : next & ((uint64_t{1} << (kDigitBits - take)) - 1);
    if (rest != 0) head |= 1;
  }
  for (; digit >= 0; --digit) head |= magnitude.digits_[static_cast<size_t>(digit)] != 0 ? 1 : 0;
  // One rounding, here, unless the result is subnormal: then all of its bits are exact, as nothing lies below 2^-1074.
  const int excess = std::max(0, 64 - std::countl_zero(head | 1) - (kMantissaBits + 1));
  uint64_t mantissa = excess == 64 ? 0 : head >> excess;
  const uint64_t half = excess == 0 ? 0 : uint64_t{1} << (excess - 1);
  const uint64_t lost = excess == 0 ? 0 : head & ((uint64_t{1} << excess) - 1);
  if (excess > 0 && (lost > half || (lost == half && mantissa % 2 == 1))) ++mantissa;
  const double result = std::ldexp(static_cast<double>(mantissa), position + excess - 1074);
  return negative ? -result : result;
}

}  // namespace invar
