#include <algorithm>

#include "core/integer.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/random_bits.cuh"
#include "ops/cuda/repeated_group.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 2048;

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>(std::min(kMostBlocks, ceil_div(count, kThreads)));
}

// each(i) for i below count, over all threads of the grid.
template <class Each>
__device__ void for_each_index(int64_t count, Each&& each) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) each(i);
}

// each(index in the group, index in all).
template <class Each>
__device__ void for_each_place(const GroupPlaces& places, int64_t count, Each&& each) {
  for_each_index(count, [&](int64_t i) {
    const int64_t x = i % places.width;
    const int64_t group = i / places.width % places.groups;
    const int64_t row = i / places.width / places.groups;
    each(row % places.length * places.width + x, row * places.token_stride + group * places.group_stride + x);
  });
}

__global__ void __launch_bounds__(kThreads) fill(__nv_bfloat16* data, int64_t count, uint64_t seed, int exponent) {
  for_each_index(count, [&](int64_t i) {
    const uint32_t bits = random_bits(seed, i);
    const uint32_t biased = 127 - 2 + (bits >> 16 & 3) + exponent;
    data[i] = __ushort_as_bfloat16(static_cast<unsigned short>((bits & 0x8000) | biased << 7 | (bits & 0x7f)));
  });
}

template <class Bits>
__global__ void __launch_bounds__(kThreads)
    repeat(const Bits* __restrict__ from, GroupPlaces places, int64_t count, Bits* __restrict__ to) {
  for_each_place(places, count, [&](int64_t in_group, int64_t in_all) { to[in_all] = from[in_group]; });
}

template <class Bits>
__global__ void __launch_bounds__(kThreads) compare(const Bits* __restrict__ group, GroupPlaces places, int64_t count,
                                                    const Bits* __restrict__ all, unsigned long long* unlike) {
  unsigned differing = 0;
  for_each_place(places, count, [&](int64_t in_group, int64_t in_all) { differing += all[in_all] != group[in_group]; });
  differing = __reduce_add_sync(0xffff'ffffu, differing);
  if (threadIdx.x % 32 == 0 && differing > 0) atomicAdd(unlike, static_cast<unsigned long long>(differing));
}

}  // namespace

void fill_group(CudaStream& stream, BF16* data, int64_t count, uint64_t seed, int exponent) {
  fill<<<blocks_of(count), kThreads, 0, stream.handle()>>>(reinterpret_cast<__nv_bfloat16*>(data), count, seed,
                                                           exponent);
  check_launch("fill_group");
}

template <class Bits>
void repeat_group(CudaStream& stream, const Bits* group, const GroupPlaces& places, Bits* all) {
  const int64_t count = places.count();
  repeat<<<blocks_of(count), kThreads, 0, stream.handle()>>>(group, places, count, all);
  check_launch("repeat_group");
}

template <class Bits>
void count_unlike(CudaStream& stream, const Bits* group, const GroupPlaces& places, const Bits* all, uint64_t* unlike) {
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
  const int64_t count = places.count();
  compare<<<blocks_of(count), kThreads, 0, stream.handle()>>>(group, places, count, all,
                                                              reinterpret_cast<unsigned long long*>(unlike));
  check_launch("count_unlike");
}

template void repeat_group(CudaStream&, const uint16_t*, const GroupPlaces&, uint16_t*);
template void repeat_group(CudaStream&, const uint32_t*, const GroupPlaces&, uint32_t*);
template void count_unlike(CudaStream&, const uint16_t*, const GroupPlaces&, const uint16_t*, uint64_t*);
template void count_unlike(CudaStream&, const uint32_t*, const GroupPlaces&, const uint32_t*, uint64_t*);

}  // namespace invar::ops::cuda
