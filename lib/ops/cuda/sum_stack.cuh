#pragma once

#include <algorithm>
#include <type_traits>

#include "ops/cuda/device_math.cuh"
#include "ops/sample_sums.h"
#include "ops/tree_sum.h"

namespace invar::ops::cuda {

// Of a kernel's parameters, at most, before CUDA 12.1.
inline constexpr size_t kParameterBytes = 4096;

// SampleSums as a kernel takes them, by value.
struct PackedSums {
  struct Place {
    uint8_t buffer, clears, joins, unused;
  };

  PackedSums(std::span<const SamplePlace> of_samples, std::span<const Tensor> sums)
      : samples(static_cast<int>(of_samples.size())) {
    for (size_t i = 0; i < of_samples.size(); ++i) {
      const SamplePlace& place = of_samples[i];
      places[i] = {static_cast<uint8_t>(place.buffer), place.clears, static_cast<uint8_t>(place.joins), 0};
    }
    for (size_t i = 0; i < sums.size(); ++i) buffers[i] = sums[i].data<float>();
  }

  int samples;
  Place places[kMostSamples];
  float* buffers[SumProgram::kMaxDepth];
};

// The sums that samples change, in registers, the top first, until they are stored. For each sample in turn: begin(),
// its terms added to top(), finish(). buffers(b): where the elements lie in buffer b.
template <int N, int kDepth>
struct SumStack {
  using Sum = Pack<float, N>;

  template <class Place, class Buffers>
  __device__ void begin(const Place& place, const Buffers& buffers) {
    if (held > 0 && place.buffer == buffer) return;
#pragma unroll
    for (int d = kDepth - 1; d > 0; --d) sums[d] = sums[d - 1];
    ++held;
    buffer = place.buffer;
    sums[0] = place.clears ? Sum{} : load_pack<N>(buffers(buffer));
  }
  __device__ Sum& top() {
    return sums[0];
  }
  template <class Place, class Buffers>
  __device__ void finish(const Place& place, const Buffers& buffers) {
    for (int joins = place.joins; joins > 0; --joins) {
      --buffer;
      if (held == 1) {
        add_to(sums[0], load_pack<N>(buffers(buffer)));
        continue;
      }
      add_to(sums[0], sums[1]);
      --held;
#pragma unroll
      for (int d = 1; d + 1 < kDepth; ++d) sums[d] = sums[d + 1];
    }
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers) const {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < held) store_pack(buffers(buffer - d), sums[d]);
    }
  }
  static __device__ void add_to(Sum& sum, const Sum& term) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum.element[k] = __fadd_rn(sum[k], term[k]);
  }

  Sum sums[kDepth];
  int held = 0;    // of them
  int buffer = 0;  // the top's
};

// The most sums that samples hold at once.
inline int depth_of(std::span<const SamplePlace> places) {
  int held = 0, top = -1, most = 0;
  for (const SamplePlace& place : places) {
    if (held == 0 || place.buffer != top) ++held;
    most = std::max(most, held);
    top = place.buffer - place.joins;
    held = std::max(1, held - place.joins);
  }
  return most;
}

// f(a constant kDepth) that is enough for these samples.
template <class F>
void with_depth(std::span<const SamplePlace> places, F&& f) {
  const int depth = depth_of(places);
  if (depth <= 1) return f(std::integral_constant<int, 1>{});
  if (depth <= 4) return f(std::integral_constant<int, 4>{});
  if (depth <= 8) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, SumProgram::kMaxDepth>{});
}

}  // namespace invar::ops::cuda
