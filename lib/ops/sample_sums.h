#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace invar::ops {

// Where a sample's gradient goes: it is added to the sum in `buffer`, which is made zero before if it clears; then
// `joins` times the buffer is added to the one below, and is of no more use until it is cleared. Of samples in turn the
// first may have any place, and the others add where the one before has left the last sum, or clear the next buffer.
struct SamplePlace {
  int buffer = 0;
  bool clears = false;
  int joins = 0;
};

// Samples that an operation adds in one call, at most: kernels have their places by value.
inline constexpr int64_t kMostSamples = 896;

// Where the terms of samples are added, one sample after another.
struct SampleSums {
  // There is one sample, added to `sum`. An operation that takes SampleSums takes a tensor too.
  SampleSums(const Tensor& sum) : places{{}}, buffers{sum} {}
  SampleSums(std::vector<SamplePlace> of_samples, std::vector<Tensor> sums)
      : places(std::move(of_samples)), buffers(std::move(sums)) {}

  std::vector<SamplePlace> places;
  std::vector<Tensor> buffers;  // buffers_needed(places) or more: higher ones are not used
};

// Buffers of sums that were begun before these samples, or that they leave. A sum that begins and ends among them is in
// none.
int buffers_needed(std::span<const SamplePlace> places);

// Error{kFault}, told of operation `op`: places of so many samples, one to kMostSamples, as SamplePlace says; buffers
// as many as they need, and no more than SumProgram::kMaxDepth.
void check_sums(std::string_view op, const SampleSums& sums, int64_t samples);

}  // namespace invar::ops
