#pragma once

#include "host_tensor.h"

namespace invar::test {

// Large enough to matter beside mean(x²) of the tests, so that its place in the formula is tested.
inline constexpr float kEps = 0.05f;

// RMSNorm of rows of `width` values; a norm without a weight has ones.
inline Values norm_reference(const Values& x, const Values& weight, size_t width) {
  Values y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    double squares = 0;
    for (size_t c = 0; c < width; ++c) squares += x[row + c] * x[row + c];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(kEps));
    for (size_t c = 0; c < width; ++c) y[row + c] = x[row + c] * rstd * weight[c];
  }
  return y;
}

}  // namespace invar::test
