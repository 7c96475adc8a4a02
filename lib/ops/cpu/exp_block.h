#pragma once

#include <algorithm>
#include <cstring>

#include "ops/cpu/vector_math.h"

namespace invar::ops::cpu {

// Loops over a row take e^x in stages of this many elements: arguments into a buffer in L1, exp, then the rest of the
// formula. The two outer stages stay plain loops.
inline constexpr int64_t kExpBlock = 512;

inline void exp_in_place(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(x + i, exp(load8(x + i)));
  if (i == n) return;
  Float8 rest{};
  const auto bytes = static_cast<size_t>(n - i) * sizeof(float);
  std::memcpy(&rest, x + i, bytes);
  rest = exp(rest);
  std::memcpy(x + i, &rest, bytes);
}

// Runs body(first, count, e) for consecutive blocks of [0, n), e[i] being e^argument(first + i).
template <class Argument, class Body>
void for_exp_blocks(int64_t n, const Argument& argument, const Body& body) {
  alignas(32) float e[kExpBlock];
  for (int64_t first = 0; first < n; first += kExpBlock) {
    const int64_t count = std::min(kExpBlock, n - first);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) e[i] = argument(first + i);
    exp_in_place(e, count);
    body(first, count, static_cast<const float*>(e));
  }
}

}  // namespace invar::ops::cpu
