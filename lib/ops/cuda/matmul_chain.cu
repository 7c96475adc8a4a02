#include "ops/cuda/matmul_chain.h"

#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/random_bits.cuh"
#include "ops/cuda/tensor_core.cuh"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;             // of c, in rows and columns
constexpr int64_t kMostTiles = 4096;  // that are compared
constexpr int64_t kFillBlocks = 2048;

enum : uint64_t { kSeedA = 1, kSeedB, kSeedC, kSeedTiles, kSeeds };

// Both operands are seen alike, as a matrix over (x, k): x is a row of op(a) or a column of op(b).
template <class T>
struct Operand {
  T* data;
  int64_t stride;
  bool x_contiguous;  // element (x, k) is data[k * stride + x]; otherwise data[x * stride + k]
  int64_t xs, ks;

  __device__ T* at(int64_t x, int64_t k) const { return data + (x_contiguous ? k * stride + x : x * stride + k); }
};

template <class T>
Operand<Element<T>> left_operand(const OrderedProduct& p) {
  return {elements<T>(p.a) + p.columns.begin, p.a.dim(1), p.transpose_a, p.m(), p.k()};
}
template <class T>
Operand<Element<T>> right_operand(const OrderedProduct& p) {
  return {elements<T>(p.b), p.b.dim(1), !p.transpose_b, p.n(), p.k()};
}

// A block's part of an operand, kTile x and kDepth k, on its way to shared memory. Neighbouring threads hold neighbours
// in memory; beyond the operand there are zeros.
template <class T, int kDepth>
struct Stage {
  static constexpr int kHeld = kTile * kDepth / kThreads;
  static_assert(kTile * kDepth % kThreads == 0);

  __device__ static int x_of(const Operand<T>& from, int i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    return from.x_contiguous ? index % kTile : index / kDepth;
  }
  __device__ static int k_of(const Operand<T>& from, int i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    return from.x_contiguous ? index / kTile : index % kDepth;
  }
  __device__ void read(const Operand<T>& from, int64_t first_x, int64_t first_k) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t x = first_x + x_of(from, i);
      const int64_t k = first_k + k_of(from, i);
      held[i] = x < from.xs && k < from.ks ? *from.at(x, k) : T(0.0f);
    }
  }
  // put(x, k, value)
  template <class Put>
  __device__ void write(const Operand<T>& from, Put&& put) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) put(x_of(from, i), k_of(from, i), held[i]);
  }

  T held[kHeld];
};

// A sign, an exponent of -7 to 7 and 23 bits of significand.
__device__ float random_float(uint64_t seed, int64_t index) {
  const uint32_t bits = random_bits(seed, index);
  const uint32_t exponent = 127 + (bits >> 28 & 7) - (bits >> 25 & 7);
  return __uint_as_float((bits & 0x8000'0000u) | exponent << 23 | (bits & 0x007f'ffffu));
}

// Its first 16 bits.
__device__ __nv_bfloat16 random_bf16(uint64_t seed, int64_t index) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(__float_as_uint(random_float(seed, index)) >> 16));
}

__device__ int64_t first_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ int64_t index_step() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

// The terms k and ks - 1 - k of a sum are opposite where x of the left operand is odd, for which the right one has
// equal elements there.
__global__ void __launch_bounds__(kThreads) fill_operand(Operand<__nv_bfloat16> operand, bool left, uint64_t seed) {
  for (int64_t i = first_index(); i < operand.xs * operand.ks; i += index_step()) {
    const int64_t x = operand.x_contiguous ? i % operand.xs : i / operand.ks;
    const int64_t k = operand.x_contiguous ? i / operand.xs : i % operand.ks;
    const int64_t opposite = operand.ks - 1 - k;
    const bool mirrored = k > opposite && (!left || x % 2 == 1);
    const __nv_bfloat16 value = random_bf16(seed, x * operand.ks + (mirrored ? opposite : k));
    *operand.at(x, k) = left && mirrored ? __hneg(value) : value;
  }
}

__global__ void __launch_bounds__(kThreads) fill_sums(float* c, int64_t count) {
  for (int64_t i = first_index(); i < count; i += index_step()) c[i] = random_float(kSeedC, i);
}

// The tile that block `index` of `count` looks at: one of each of `count` equal runs of all tiles.
__device__ int64_t sampled_tile(int64_t index, int64_t count, int64_t tiles) {
  if (index == 0) return 0;
  if (index == count - 1) return tiles - 1;
  const int64_t begin = index * tiles / count;
  const int64_t end = (index + 1) * tiles / count;
  return begin + random_bits(kSeedTiles, index) % (end - begin);
}

__device__ uint32_t bits_of(float value) {
  return __float_as_uint(value);
}
__device__ uint32_t bits_of(__nv_bfloat16 value) {
  return __bfloat16_as_ushort(value);
}

// Where a tile of c begins.
struct Corner {
  int64_t row, column;
};
template <class T>
__device__ Corner corner_of(int64_t tile, const Operand<T>& right) {
  const int64_t tiles = (right.xs + kTile - 1) / kTile;
  return {tile / tiles * kTile, tile % tiles * kTile};
}

constexpr int kFmaDepth = 16;
using FmaTile = float[kFmaDepth][kTile + 4];

// sums += left · right over the first `depth` of k, for 4 rows and columns of the tile per thread.
__device__ void add_products(float (&sums)[4][4], const FmaTile& left, const FmaTile& right, int row, int column,
                             int64_t depth) {
#pragma unroll
  for (int k = 0; k < kFmaDepth; ++k) {
    if (k >= depth) return;  // a product of zeros would turn a sum of -0 into +0
    const auto a = load_pack<4>(&left[k][row]), b = load_pack<4>(&right[k][column]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = __fmaf_rn(a[i], b[j], sums[i][j]);
    }
  }
}

// A tile of c.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    multiply_by_chain(Operand<float> a, Operand<float> b, Out* c, bool accumulate) {
  __shared__ alignas(16) FmaTile left, right;
  const Corner first = corner_of(blockIdx.x, b);
  const int row = static_cast<int>(threadIdx.x) / 16 * 4, column = static_cast<int>(threadIdx.x) % 16 * 4;
  float sums[4][4] = {};
  for (int64_t k = 0; k < a.ks; k += kFmaDepth) {
    Stage<float, kFmaDepth> a_part, b_part;
    a_part.read(a, first.row, k);
    b_part.read(b, first.column, k);
    __syncthreads();
    a_part.write(a, [&](int x, int depth, float value) { left[depth][x] = value; });
    b_part.write(b, [&](int x, int depth, float value) { right[depth][x] = value; });
    __syncthreads();
    add_products(sums, left, right, row, column, a.ks - k);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t x = first.row + row + i / 4, y = first.column + column + i % 4;
    if (x >= a.xs || y >= b.xs) continue;
    Out& to = c[x * b.xs + y];
    const float sum = sums[i / 4][i % 4];
    store(to, accumulate ? __fadd_rn(sum, load(to)) : sum);
  }
}

// Shared memory holds a pair of neighbours in k per word; rows are so long that a fragment's words lie in different
// banks.
constexpr int kChainDepth = 64;
using ChainTile = __nv_bfloat16[kTile][kChainDepth + 8];

__device__ uint32_t pair_at(const ChainTile& tile, int x, int k) {
  return reinterpret_cast<const uint32_t&>(tile[x][k]);
}

// sums += left · right over the first `depth` of k, for 16 rows and 32 columns of the tile per warp.
__device__ void add_steps(float (&sums)[4][4], const ChainTile& left, const ChainTile& right, int64_t depth) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp % 4 * 16 + lane / 4, column = warp / 4 * 32 + lane / 4;
  for (int k = 0; k < depth; k += 16) {
    const int at = k + lane % 4 * 2;
    const uint32_t a[4] = {pair_at(left, row, at), pair_at(left, row + 8, at), pair_at(left, row, at + 8),
                           pair_at(left, row + 8, at + 8)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_add(sums[i], a, pair_at(right, column + 8 * i, at), pair_at(right, column + 8 * i, at + 8));
    }
  }
}

// each(index in c, sum) for the elements of a tile of c that this thread has.
template <class Each>
__device__ void chain_of_tile(const Operand<__nv_bfloat16>& a, const Operand<__nv_bfloat16>& b, int64_t tile,
                              Each&& each) {
  __shared__ alignas(16) ChainTile left, right;
  const Corner first = corner_of(tile, b);
  float sums[4][4] = {};
  for (int64_t k = 0; k < a.ks; k += kChainDepth) {
    Stage<__nv_bfloat16, kChainDepth> a_part, b_part;
    a_part.read(a, first.row, k);
    b_part.read(b, first.column, k);
    __syncthreads();
    a_part.write(a, [&](int x, int depth, __nv_bfloat16 value) { left[x][depth] = value; });
    b_part.write(b, [&](int x, int depth, __nv_bfloat16 value) { right[x][depth] = value; });
    __syncthreads();
    add_steps(sums, left, right, min(int64_t{kChainDepth}, a.ks - k));
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t row = first.row + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int64_t column = first.column + warp / 4 * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < a.xs && column < b.xs) each(row * b.xs + column, sums[i / 4][i % 4]);
  }
}

template <class Out>
__global__ void __launch_bounds__(kThreads)
    multiply_by_steps(Operand<__nv_bfloat16> a, Operand<__nv_bfloat16> b, Out* c, bool accumulate) {
  chain_of_tile(a, b, blockIdx.x,
                [=](int64_t at, float sum) { store(c[at], accumulate ? __fadd_rn(sum, load(c[at])) : sum); });
}

// Adds to *unlike the number of elements of a tile of c that have other bits than the order gives.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    compare_with_chain(Operand<__nv_bfloat16> a, Operand<__nv_bfloat16> b, const Out* c, bool accumulate, int64_t tiles,
                       unsigned long long* unlike) {
  unsigned differing = 0;
  chain_of_tile(a, b, sampled_tile(blockIdx.x, gridDim.x, tiles), [&](int64_t at, float sum) {
    Out expected;
    store(expected, accumulate ? __fadd_rn(sum, random_float(kSeedC, at)) : sum);
    differing += bits_of(expected) != bits_of(c[at]);
  });
  differing = __reduce_add_sync(0xffff'ffffu, differing);
  if (threadIdx.x % 32 == 0 && differing > 0) atomicAdd(unlike, static_cast<unsigned long long>(differing));
}

int64_t tiles_of(const OrderedProduct& product) {
  return ceil_div(product.m(), kTile) * ceil_div(product.n(), kTile);
}

unsigned fill_blocks(int64_t elements) {
  return static_cast<unsigned>(std::min(kFillBlocks, ceil_div(elements, kThreads)));
}

}  // namespace

void multiply_f32_in_order(CudaStream& stream, const OrderedProduct& product) {
  visit_float("matmul", product.c.dtype(), [&]<class Out>(std::type_identity<Out>) {
    multiply_by_chain<<<static_cast<unsigned>(tiles_of(product)), kThreads, 0, stream.handle()>>>(
        left_operand<float>(product), right_operand<float>(product), elements<Out>(product.c), product.accumulate);
  });
  check_launch("matmul");
}

void multiply_bf16_in_order(CudaStream& stream, const OrderedProduct& product) {
  visit_float("matmul", product.c.dtype(), [&]<class Out>(std::type_identity<Out>) {
    multiply_by_steps<<<static_cast<unsigned>(tiles_of(product)), kThreads, 0, stream.handle()>>>(
        left_operand<BF16>(product), right_operand<BF16>(product), elements<Out>(product.c), product.accumulate);
  });
  check_launch("matmul");
}

void fill_for_comparison(CudaStream& stream, const OrderedProduct& product, uint64_t sample) {
  const auto left = left_operand<BF16>(product), right = right_operand<BF16>(product);
  fill_operand<<<fill_blocks(left.xs * left.ks), kThreads, 0, stream.handle()>>>(left, true, kSeedA + sample * kSeeds);
  fill_operand<<<fill_blocks(right.xs * right.ks), kThreads, 0, stream.handle()>>>(right, false,
                                                                                   kSeedB + sample * kSeeds);
  if (product.accumulate) {
    const int64_t count = product.c.numel();
    fill_sums<<<fill_blocks(count), kThreads, 0, stream.handle()>>>(product.c.data<float>(), count);
  }
  check_launch("matmul comparison");
}

int64_t count_out_of_order(CudaStream& stream, const OrderedProduct& product) {
  auto* unlike = static_cast<unsigned long long*>(stream.workspace(sizeof(unsigned long long)));
  check_cuda(cudaMemsetAsync(unlike, 0, sizeof *unlike, stream.handle()), "cudaMemsetAsync");
  const int64_t tiles = tiles_of(product);
  const auto blocks = static_cast<unsigned>(std::min(kMostTiles, tiles));
  visit_float("matmul comparison", product.c.dtype(), [&]<class Out>(std::type_identity<Out>) {
    compare_with_chain<<<blocks, kThreads, 0, stream.handle()>>>(left_operand<BF16>(product),
                                                                 right_operand<BF16>(product), elements<Out>(product.c),
                                                                 product.accumulate, tiles, unlike);
  });
  check_launch("matmul comparison");
  unsigned long long count = 0;
  check_cuda(cudaMemcpyAsync(&count, unlike, sizeof count, cudaMemcpyDeviceToHost, stream.handle()), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream.handle()), "matmul comparison");
  return static_cast<int64_t>(count);
}

}  // namespace invar::ops::cuda
