#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

// Reductions along a row, in an order that depends on the row's length only, written so that compilers vectorise it.
namespace invar::ops::cpu {

inline constexpr int kLanes = 16;
inline constexpr int64_t kLaneBlock = 4096;

// Sum of the terms of a block; accumulate(i, sum) returns sum + term i. Lane l is the chain of terms begin + l,
// begin + l + 16, ... in the type Sum; lanes are joined by halving.
template <class Sum, class Accumulate>
Sum lane_block_sum(int64_t begin, int64_t end, Accumulate accumulate) {
  Sum lanes[kLanes] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = accumulate(i + lane, lanes[lane]);
  }
  for (int lane = 0; i < end; ++i, ++lane) lanes[lane] = accumulate(i, lanes[lane]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Sum of n terms: blocks of kLaneBlock terms in fp32, joined in ascending order in fp64. Rounded once to fp32.
template <class Accumulate>
float lane_sum(int64_t n, Accumulate accumulate) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kLaneBlock) {
    total += static_cast<double>(lane_block_sum<float>(begin, std::min(n, begin + kLaneBlock), accumulate));
  }
  return static_cast<float>(total);
}

// Largest of n values, -inf if there are none. A NaN is passed over.
inline float lane_max(int64_t n, const float* x) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] = x[i] > lanes[lane] ? x[i] : lanes[lane];
  return *std::max_element(lanes, lanes + kLanes);
}

}  // namespace invar::ops::cpu
