#pragma once

#include <cstdint>
#include <span>
#include <string_view>
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

// In a call of an operation that adds those of samples in turn.
inline constexpr int64_t kMostSamples = 896;

// Error{kFault} if they are others than SamplePlace says, or not of so many samples, at most kMostSamples.
void check_places(std::string_view op, std::span<const SamplePlace> places, int64_t samples);

// Buffers of sums that were begun before the samples, or that they leave: one that begins and ends among them has no
// use for its buffer.
int buffers_needed(std::span<const SamplePlace> places);

// Error{kFault} for fewer buffers than are needed, and for more than are taken (SumProgram::kMaxDepth).
void check_buffers(std::string_view op, std::span<const Tensor> buffers, int needed);

// Where samples of equal length add, in turn, the terms of their tokens: buffers_needed(places) buffers or more.
struct SampleSums {
  // All tokens are one sample's, added to `sum`.
  SampleSums(const Tensor& sum) : places{{}}, buffers{sum} {}
  SampleSums(std::vector<SamplePlace> of_samples, std::vector<Tensor> sums)
      : places(std::move(of_samples)), buffers(std::move(sums)) {}

  std::vector<SamplePlace> places;
  std::vector<Tensor> buffers;
};

}  // namespace invar::ops
