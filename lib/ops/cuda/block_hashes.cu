#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kPerThread = 32;
constexpr int kAhead = 8;  // elements that a thread reads before it adds the first of them

using Hash = unsigned long long;

// The sum of a thread's terms in one block; goes to memory when the next one begins.
struct BlockSum {
  Hash* blocks;
  int64_t block;
  Hash sum = 0;

  __device__ void add(int64_t index, float value) {
    if (index / kHashBlock != block) {
      write();
      block = index / kHashBlock;
      sum = 0;
    }
    sum += hash_term(index, __float_as_uint(value));
  }
  // Element i of `count` is values[i · stride], in the tensor first + i · step.
  __device__ void add(const float* values, int64_t stride, int64_t first, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; i += kAhead) {
      float ahead[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (i + k < count) ahead[k] = values[(i + k) * stride];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (i + k < count) add(first + (i + k) * step, ahead[k]);
      }
    }
  }
  __device__ void write() const {
    if (sum != 0) atomicAdd(&blocks[block], sum);
  }
};

// Neighbours in storage are neighbours in the tensor: lanes read them side by side, and mostly end in one block.
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const float* values, int64_t count, int64_t first, Hash* blocks) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t begin = min(count, warp * kWarp * kPerThread + threadIdx.x % kWarp);
  const int64_t own_count = min(int64_t{kPerThread}, (count - begin + kWarp - 1) / kWarp);
  BlockSum own{blocks, (first + min(begin, count - 1)) / kHashBlock};
  own.add(values + begin, kWarp, first + begin, kWarp, own_count);
  if (__all_sync(~0u, own.block == __shfl_sync(~0u, own.block, 0)) != 0) {
    for (int lane = kWarp / 2; lane > 0; lane /= 2) own.sum += __shfl_down_sync(~0u, own.sum, lane);
    if (threadIdx.x % kWarp != 0) return;
  }
  own.write();
}

// A column's elements are neighbours in the tensor, or parted by those of the columns in its block: a thread goes down.
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const float* values, int64_t rows, int64_t cols, LogicalIndex index, Hash* blocks) {
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= cols) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kPerThread;
  const int64_t first = index.at(begin, col);
  BlockSum own{blocks, first / kHashBlock};
  own.add(values + begin * cols + col, cols, first, index.row_stride, min(int64_t{kPerThread}, rows - begin));
  own.write();
}

}  // namespace

void add_block_hashes(const Stream& stream, const Tensor& values, const LogicalIndex& index, const Tensor& blocks) {
  const auto* const from = values.data<float>();
  auto* const sums = static_cast<Hash*>(blocks.raw());
  const int64_t rows = values.dim(0), cols = values.dim(1);
  if (index.block == cols) {
    const int64_t grid = ceil_div(values.numel(), int64_t{kThreads} * kPerThread);
    flat_kernel<<<static_cast<unsigned>(grid), kThreads, 0, cuda_handle(stream)>>>(from, values.numel(), index.first,
                                                                                   sums);
  } else {
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, int64_t{kThreads})),
                    static_cast<unsigned>(ceil_div(rows, int64_t{kPerThread})));
    INVAR_CHECK(grid.y <= 65535, "add_block_hashes: {} rows", rows);
    columns_kernel<<<grid, kThreads, 0, cuda_handle(stream)>>>(from, rows, cols, index, sums);
  }
  check_launch("add_block_hashes");
}

}  // namespace invar::ops::cuda
