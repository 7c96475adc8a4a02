#include <algorithm>

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

// An element as the fp32 that is hashed.
template <class T>
struct AsItIs {
  using Element = T;
  static __device__ float value(T element) { return load(element); }
};
struct Rounded {
  using Element = float;
  static __device__ float value(float element) { return __bfloat162float(__float2bfloat16_rn(element)); }
};

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
  template <class As>
  __device__ void add(const typename As::Element* values, int64_t stride, int64_t first, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; i += kAhead) {
      typename As::Element ahead[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (i + k < count) ahead[k] = values[(i + k) * stride];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (i + k < count) add(first + (i + k) * step, As::value(ahead[k]));
      }
    }
  }
  __device__ void write() const {
    if (sum != 0) atomicAdd(&blocks[block], sum);
  }
};

// Runs of one launch, by value.
constexpr int kRuns = 64;
struct Call {
  const void* values;
  int64_t cols;
  Hash* blocks;
  HashedRows runs[kRuns];
};

// Neighbours in storage are neighbours in the tensor: lanes read them side by side, and mostly end in one block.
template <class As>
__global__ void __launch_bounds__(kThreads) flat_kernel(const __grid_constant__ Call call) {
  const HashedRows& run = call.runs[blockIdx.y];
  const int64_t count = run.rows.size() * call.cols, first = run.index.first;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp * kWarp * kPerThread >= count) return;
  const int64_t begin = min(count, warp * kWarp * kPerThread + threadIdx.x % kWarp);
  const int64_t own_count = min(int64_t{kPerThread}, (count - begin + kWarp - 1) / kWarp);
  BlockSum own{call.blocks, (first + min(begin, count - 1)) / kHashBlock};
  const auto* const values = static_cast<const typename As::Element*>(call.values);
  own.template add<As>(values + run.rows.begin * call.cols + begin, kWarp, first + begin, kWarp, own_count);
  if (__all_sync(~0u, own.block == __shfl_sync(~0u, own.block, 0)) != 0) {
    own.sum = lane_sum(own.sum);
    if (threadIdx.x % kWarp != 0) return;
  }
  own.write();
}

// A column's elements are neighbours in the tensor, or parted by those of the columns in its block: a thread goes down.
template <class As>
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Call call) {
  const HashedRows& run = call.runs[blockIdx.z];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kPerThread;
  if (col >= call.cols || begin >= run.rows.size()) return;
  const int64_t first = run.index.at(begin, col);
  BlockSum own{call.blocks, first / kHashBlock};
  const auto* const values = static_cast<const typename As::Element*>(call.values);
  own.template add<As>(values + (run.rows.begin + begin) * call.cols + col, call.cols, first, run.index.row_stride,
                       min(int64_t{kPerThread}, run.rows.size() - begin));
  own.write();
}

template <class As>
void launch(const Stream& stream, const Call& call, std::span<const HashedRows> runs) {
  int64_t rows = 0;
  for (const HashedRows& run : runs) rows = std::max(rows, run.rows.size());
  const auto count = static_cast<unsigned>(runs.size());
  if (runs.front().index.block == call.cols) {
    const auto blocks = static_cast<unsigned>(ceil_div(rows * call.cols, int64_t{kThreads} * kPerThread));
    flat_kernel<As><<<dim3(blocks, count), kThreads, 0, cuda_handle(stream)>>>(call);
  } else {
    const auto down = ceil_div(rows, int64_t{kPerThread});
    INVAR_CHECK(down <= 65535, "add_block_hashes: {} rows", rows);
    const dim3 grid(static_cast<unsigned>(ceil_div(call.cols, int64_t{kThreads})), static_cast<unsigned>(down), count);
    columns_kernel<As><<<grid, kThreads, 0, cuda_handle(stream)>>>(call);
  }
  check_launch("add_block_hashes");
}

template <class As>
void add_runs(const Stream& stream, const Tensor& values, std::span<const HashedRows> runs, const Tensor& blocks) {
  Call call{values.raw(), values.dim(1), static_cast<Hash*>(blocks.raw()), {}};
  while (!runs.empty()) {
    const auto other = std::ranges::find_if(runs, [&](const HashedRows& run) {
      return (run.index.block == call.cols) != (runs.front().index.block == call.cols);
    });
    const std::span<const HashedRows> some(runs.begin(),
                                           std::min(other, runs.begin() + std::min<int64_t>(kRuns, std::ssize(runs))));
    std::ranges::copy(some, call.runs);
    launch<As>(stream, call, some);
    runs = runs.subspan(some.size());
  }
}

}  // namespace

void add_block_hashes(const Stream& stream, const Tensor& values, std::span<const HashedRows> runs,
                      const Tensor& blocks, DType rounded) {
  if (values.dtype() == DType::kBF16) return add_runs<AsItIs<__nv_bfloat16>>(stream, values, runs, blocks);
  if (rounded == DType::kBF16) return add_runs<Rounded>(stream, values, runs, blocks);
  add_runs<AsItIs<float>>(stream, values, runs, blocks);
}

}  // namespace invar::ops::cuda
