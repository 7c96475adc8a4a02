#pragma once

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"

// Operations on neighbours that nobody else touches. An operation has a type Values, read(i, values) and
// write(i, values), where i counts packs of its own width; read of a pack comes before write of that pack, so that a
// result may take an operand's place.
namespace invar::ops::cuda {

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwiseUnroll = 2;  // packs per thread, all read before the first is written

template <class Operation>
__global__ void __launch_bounds__(kElementwiseThreads) elementwise_kernel(Operation operation, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kElementwiseThreads * kElementwiseUnroll) + threadIdx.x;
  typename Operation::Values values[kElementwiseUnroll];
#pragma unroll
  for (int u = 0; u < kElementwiseUnroll; ++u) {
    if (first + u * kElementwiseThreads < count) operation.read(first + u * kElementwiseThreads, values[u]);
  }
#pragma unroll
  for (int u = 0; u < kElementwiseUnroll; ++u) {
    if (first + u * kElementwiseThreads < count) operation.write(first + u * kElementwiseThreads, values[u]);
  }
}

// The operation on `count` packs.
template <class Operation>
void run_elementwise(const Stream& stream, std::string_view op, int64_t count, const Operation& operation) {
  if (count == 0) return;
  const int64_t blocks = ceil_div(count, kElementwiseThreads * kElementwiseUnroll);
  elementwise_kernel<<<static_cast<unsigned>(blocks), kElementwiseThreads, 0, cuda_handle(stream)>>>(operation, count);
  check_launch(op);
}

// f(N, first, count) with a constant N for runs of `count` packs of N that begin at element `first`: packs of kWidth
// and the elements that remain, or single elements if packs of kWidth are not aligned.
template <int kWidth, class F>
void for_packs(bool aligned, int64_t n, F&& f) {
  const int64_t packs = aligned ? n / kWidth : 0;
  f(std::integral_constant<int, kWidth>{}, int64_t{0}, packs);
  f(std::integral_constant<int, 1>{}, packs * kWidth, n - packs * kWidth);
}

}  // namespace invar::ops::cuda
