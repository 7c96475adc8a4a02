#include "ops/cuda/operations.h"
#include "ops/cuda/proof.h"

#include <cudaTypedefs.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/matmul_chain.h"
#include "ops/cuda/tensor_core.cuh"

// A block makes a tile of the result from all leaves, one after another, and adds them in its own memory: a leaf is a
// chain of tensor core steps of 16 over ascending k, as in matmul_chain.h. One thread copies the operands, two
// warpgroups multiply. The tiles of two blocks of a cluster lie below each other and share what they read of b.
namespace invar::ops::cuda {
namespace {

constexpr int kTile = 128;  // of the result, in rows and columns
constexpr int kDepth = 64;  // of k, in a stage: rows of 128 bytes
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kCluster = 2;
constexpr int kMostLeaves = 64;
constexpr int kMostNodes = 4;  // and sums that wait for others at once
constexpr int kGroup = 8;      // pairs of tiles below each other that take turns, so that they find operands in cache

constexpr int kRowsStep = 1024;  // bytes of 8 rows
constexpr int kOperandBytes = kTile * kDepth * 2;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSumBytes = kTile * kTile * 4;
constexpr int kSharedBytes = 226 << 10;
constexpr int kBarrierBytes = 1024;  // and the alignment of stages

// The last two sums are in registers, those before them in shared memory.
constexpr int stages_beside(int sums) {
  return std::min(5, (kSharedBytes - 2 * kBarrierBytes - sums * kSumBytes) / kStageBytes);
}

struct Leaf {
  int32_t first, size;  // of k
  int16_t add, joins;
};

struct Work {
  int64_t m, n;
  int pairs, columns;  // of tiles: pairs of rows, columns
  int leaves;
  Leaf leaf[kMostLeaves];
  void* nodes[kMostNodes];
  bool rounded;         // nodes are bf16
  bool rounded_leaves;  // to bf16 before they are added
};

// Where the tile of this block in pair `index` of all begins.
struct Place {
  __device__ Place(const Work& work, int index, int block) {
    const int group = index / (kGroup * work.columns);
    const int rows = min(kGroup, work.pairs - group * kGroup);
    const int rest = index - group * kGroup * work.columns;
    row = ((group * kGroup + rest % rows) * kCluster + block) * kTile;
    column = rest / rows * kTile;
  }
  int row, column;
};

// Position in the ring of stages.
template <int kStages>
struct Ring {
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  int stage = 0;
  uint32_t parity = 0;
};

struct Shared {
  __device__ uint32_t full(int stage) const { return base + 16 * stage; }       // its bytes are there
  __device__ uint32_t empty(int stage) const { return base + 16 * stage + 8; }  // all that read it have done so
  __device__ uint32_t left(int stage) const { return base + kBarrierBytes + stage * kStageBytes; }
  __device__ uint32_t right(int stage) const { return left(stage) + kOperandBytes; }
  uint32_t base;
};

template <int kStages>
__device__ void copy_operands(const Work& work, const CUtensorMap& a, const CUtensorMap& b, Shared shared) {
  const uint32_t block = hopper::block_of_cluster();
  constexpr auto kBoth = static_cast<uint16_t>((1 << kCluster) - 1);
  constexpr int kHalf = kTile / kCluster;
  Ring<kStages> ring;
  for (int pair = static_cast<int>(blockIdx.x) / kCluster; pair < work.pairs * work.columns;
       pair += static_cast<int>(gridDim.x) / kCluster) {
    const Place place(work, pair, static_cast<int>(block));
    for (int l = 0; l < work.leaves; ++l) {
      const Leaf leaf = work.leaf[l];
      for (int k = 0; k < leaf.size; k += kDepth, ring.advance()) {
        hopper::wait_at(shared.empty(ring.stage), ring.parity ^ 1);
        const uint32_t full = shared.full(ring.stage);
        hopper::arrive_and_expect(full, kStageBytes);
        hopper::copy_box(a, leaf.first + k, place.row, shared.left(ring.stage), full,
                         static_cast<uint16_t>(1 << block));
        // Of b each block reads one half of the columns for both.
        hopper::copy_box(b, place.column + kHalf * static_cast<int>(block), leaf.first + k,
                         shared.right(ring.stage) + block * (kOperandBytes / kCluster), full, kBoth);
      }
    }
  }
  // What the other block reads last is still to be given back to this one, which must not be gone.
  for (int i = 0; i < kStages; ++i, ring.advance()) hopper::wait_at(shared.empty(ring.stage), ring.parity ^ 1);
}

// 64 rows of a tile, in the registers and the part of shared memory of a warpgroup.
template <int kStages, int kAside>
class Sums {
 public:
  __device__ Sums(Shared shared, float4* aside) : shared_(shared), aside_(aside) {}

  // The chain of a leaf.
  __device__ void multiply(const Leaf& leaf) {
    int before = -1;
    for (int k = 0; k < leaf.size; k += kDepth, ring_.advance()) {
      hopper::wait_at(shared_.full(ring_.stage), ring_.parity);
      const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
      const uint64_t left =
          hopper::describe(shared_.left(ring_.stage) + warpgroup * (kOperandBytes / 2), 16, kRowsStep);
      const uint64_t right = hopper::describe(shared_.right(ring_.stage), kOperandBytes / 2, kRowsStep);
      if (leaf.size - k >= kDepth) {
        hopper::begin_products();
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) multiply(left, right, step, k);
        hopper::commit_products();
      } else {
        for (int step = 0; step < (leaf.size - k) / 16; ++step) {
          hopper::begin_products();
          multiply(left, right, step, k);
          hopper::commit_products();
        }
      }
      if (before >= 0) {
        hopper::wait_for_products<1>();
        give_back(before);
      }
      before = ring_.stage;
    }
    hopper::wait_for_products<0>();
    hopper::hold_sums(chain_);
    give_back(before);
  }

  // The leaf becomes the last of the sums, or is added to it.
  __device__ void take(const Leaf& leaf, bool rounded) {
    if (rounded) {
#pragma unroll
      for (int i = 0; i < 64; ++i) chain_[i] = __bfloat162float(__float2bfloat16_rn(chain_[i]));
    }
    if (leaf.add) {
      add(chain_, last_);
    } else {
      if (count_ >= 2) put_aside();
      ++count_;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        before_[i] = last_[i];
        last_[i] = chain_[i];
      }
    }
#pragma unroll 1
    for (int joins = leaf.joins; joins > 0; --joins) {
      add(before_, last_);
      drop_one();
    }
  }

  // The sums to the nodes, last first.
  __device__ void write(const Work& work, Place place) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int row =
        place.row + (static_cast<int>(threadIdx.x) / kWarpgroup - 1) * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int column = place.column + thread % 4 * 2;
#pragma unroll 1
    while (count_ > 0) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {  // rows 8 apart
        const int64_t at = (row + 8 * half) * work.n + column;
        const int columns = row + 8 * half < work.m ? static_cast<int>(work.n) - column : 0;
        if (work.rounded) {
          auto* const out = static_cast<__nv_bfloat16*>(work.nodes[count_ - 1]) + at;
          write_pairs(half, columns,
                      [=](int i, float x, float y) { *reinterpret_cast<uint32_t*>(out + 8 * i) = pack_bf16(x, y); });
        } else {
          auto* const out = static_cast<float*>(work.nodes[count_ - 1]) + at;
          write_pairs(half, columns,
                      [=](int i, float x, float y) { *reinterpret_cast<float2*>(out + 8 * i) = make_float2(x, y); });
        }
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) last_[i] = before_[i];
      drop_one();
    }
  }

 private:
  // A step of 16 of the stage that begins at k of the leaf.
  __device__ void multiply(uint64_t left, uint64_t right, int step, int k) {
    hopper::multiply_64x128(chain_, hopper::moved(left, 32 * step), hopper::moved(right, 2 * kRowsStep * step),
                            k + step > 0);
  }
  template <class Write>
  __device__ void write_pairs(int half, int columns, const Write& write) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (8 * i >= columns) return;
      const float *low = &last_[4 * i], *high = low + 2;
      write(i, half == 0 ? low[0] : high[0], half == 0 ? low[1] : high[1]);
    }
  }
  static __device__ void add(const float (&from)[64], float (&to)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) to[i] = __fadd_rn(from[i], to[i]);
  }
  // The sum before the last goes to memory, and comes back when there is one less.
  __device__ void put_aside() {
#pragma unroll
    for (int i = 0; i < 16 && kAside > 0; ++i) {
      aside(count_ - 2, i) = make_float4(before_[4 * i], before_[4 * i + 1], before_[4 * i + 2], before_[4 * i + 3]);
    }
  }
  __device__ void drop_one() {
    --count_;
#pragma unroll
    for (int i = 0; i < 16 && kAside > 0 && count_ >= 2; ++i) {
      const float4 sums = aside(count_ - 2, i);
      before_[4 * i] = sums.x;
      before_[4 * i + 1] = sums.y;
      before_[4 * i + 2] = sums.z;
      before_[4 * i + 3] = sums.w;
    }
  }
  // Neighbouring threads hold neighbours.
  __device__ float4& aside(int sum, int i) const {
    return aside_[(sum * 16 + i) * 2 * kWarpgroup + static_cast<int>(threadIdx.x) - kWarpgroup];
  }
  // To both blocks whose copies land there.
  __device__ void give_back(int stage) const {
    if (threadIdx.x % 32 == 0) {
      for (uint32_t block = 0; block < kCluster; ++block) hopper::arrive_at(shared_.empty(stage), block);
    }
  }

  Shared shared_;
  float4* aside_;
  Ring<kStages> ring_;
  int count_ = 0;
  float chain_[64], last_[64], before_[64];
};

template <int kAside>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    leaf_products_kernel(const __grid_constant__ Work work, const __grid_constant__ CUtensorMap a,
                         const __grid_constant__ CUtensorMap b) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "for sm_90a alone: see CMakeLists.txt"
#else
  constexpr int kStages = stages_beside(kAside);
  extern __shared__ std::byte memory[];
  const Shared shared{(shared_address(memory) + kBarrierBytes - 1) / kBarrierBytes * kBarrierBytes};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::init_barrier(shared.full(stage), 1);
      hopper::init_barrier(shared.empty(stage), kCluster * 2 * kWarpgroup / 32);  // a warp each
    }
    hopper::publish_barriers();
  }
  hopper::arrive_at_cluster();
  hopper::wait_for_cluster();
  if (threadIdx.x < kWarpgroup) {
    hopper::give_up_registers<40>();
    if (threadIdx.x == 0) copy_operands<kStages>(work, a, b, shared);
  } else {
    hopper::take_registers<232>();
    const auto aside = shared.base - shared_address(memory) + kBarrierBytes + kStages * kStageBytes;
    Sums<kStages, kAside> sums(shared, reinterpret_cast<float4*>(memory + aside));
    for (int pair = static_cast<int>(blockIdx.x) / kCluster; pair < work.pairs * work.columns;
         pair += static_cast<int>(gridDim.x) / kCluster) {
      for (int l = 0; l < work.leaves; ++l) {
        sums.multiply(work.leaf[l]);
        sums.take(work.leaf[l], work.rounded_leaves);
      }
      sums.write(work, Place(work, pair, static_cast<int>(hopper::block_of_cluster())));
    }
  }
#endif
}

// Without leaves.
Work work_of(const Tensor& a, const Tensor& b, DType leaf, DType out) {
  Work work{};
  work.m = a.dim(0);
  work.n = b.dim(1);
  work.pairs = static_cast<int>(ceil_div(work.m, kCluster * kTile));
  work.columns = static_cast<int>(ceil_div(work.n, kTile));
  work.rounded = out == DType::kBF16;
  work.rounded_leaves = leaf == DType::kBF16;
  return work;
}

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
             "cudaGetDriverEntryPoint");
#endif
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found == cudaDriverEntryPointSuccess ? function : nullptr);
}

// What is asked of a device once, and whether the kernels keep the order there.
class LeafProducts {
 public:
  explicit LeafProducts(CudaStream& stream) : stream_(stream) {
    int major = 0, minor = 0;
    const auto get = [&](int& value, cudaDeviceAttr attribute) {
      check_cuda(cudaDeviceGetAttribute(&value, attribute, stream.device()), "cudaDeviceGetAttribute");
    };
    get(major, cudaDevAttrComputeCapabilityMajor);
    get(minor, cudaDevAttrComputeCapabilityMinor);
    get(multiprocessors_, cudaDevAttrMultiProcessorCount);
    if (major != 9 || minor != 0) return;
    encode_ = tensor_map_encoder();
    available_ = encode_ != nullptr && keeps_order(2) && keeps_order(3) && keeps_order(4);
    stream.attachment<ProofRecord>().leaves_one_by_one = !available_;
  }

  bool available() const { return available_; }

  void run(const Work& work, int buffers, const Tensor& a, const Tensor& b) const {
    run(work, buffers, a, b, std::min(multiprocessors_ / kCluster, work.pairs * work.columns));
  }

 private:
  void run(const Work& work, int buffers, const Tensor& a, const Tensor& b, int clusters) const {
    if (buffers <= 2) return launch<0>(work, a, b, clusters);
    if (buffers == 3) return launch<1>(work, a, b, clusters);
    launch<2>(work, a, b, clusters);
  }

  template <int kAside>
  void launch(const Work& work, const Tensor& a, const Tensor& b, int clusters) const {
    static_assert(stages_beside(kAside) >= 3);
    const auto kernel = leaf_products_kernel<kAside>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
               "cudaFuncSetAttribute");
    kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kSharedBytes, stream_.handle()>>>(
        work, map(a, kTile), map(b, kDepth));
    check_launch("matmul_leaves");
  }

  // Boxes of `rows` rows and 128 bytes of a row-major matrix.
  CUtensorMap map(const Tensor& matrix, int rows) const {
    CUtensorMap map;
    const std::array<cuuint64_t, 2> sizes{static_cast<cuuint64_t>(matrix.dim(1)),
                                          static_cast<cuuint64_t>(matrix.dim(0))};
    const std::array<cuuint64_t, 1> strides{2 * sizes[0]};
    const std::array<cuuint32_t, 2> box{64, static_cast<cuuint32_t>(rows)}, steps{1, 1};
    const CUresult result =
        encode_(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix.raw(), sizes.data(), strides.data(), box.data(),
                steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    INVAR_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled of {}: {}", matrix.describe(),
                static_cast<int>(result));
    return map;
  }

  // The shape of the proof, and the memory for so many nodes.
  static constexpr int64_t kM = 600, kN = 264, kLeaf = 208;
  static constexpr int64_t proof_bytes(int nodes) {
    return (kM + kN) * 2 * nodes * kLeaf * 2 + (nodes + 1) * kM * kN * 4;
  }
  // The kernel for so many sums at once gives so many nodes of two leaves each, on one cluster that makes several
  // tiles, as multiply_bf16_in_order() does.
  bool keeps_order(int nodes) const {
    static_assert(proof_bytes(kMostNodes) <= kLeavesProofBytes);
    const int64_t k = 2 * nodes * kLeaf;
    const Proof proof(stream_, proof_bytes(nodes), "leaves are added in order");
    std::byte* next = proof.memory();
    const auto take = [&](DType dtype, int64_t rows, int64_t columns) {
      const Tensor tensor(next, dtype, DeviceType::kCuda, {rows, columns});
      next += tensor.bytes();
      return tensor;
    };
    const Tensor a = take(DType::kBF16, kM, k), b = take(DType::kBF16, k, kN), expected = take(DType::kF32, kM, kN);
    fill_for_comparison(stream_, {a, {0, k}, false, b, false, expected, false});
    Work work = work_of(a, b, DType::kF32, DType::kF32);
    for (int leaf = 0; leaf < 2 * nodes; ++leaf) {
      work.leaf[work.leaves++] = {static_cast<int32_t>(leaf * kLeaf), kLeaf, static_cast<int16_t>(leaf % 2), 0};
    }
    std::vector<Tensor> made;
    for (int node = 0; node < nodes; ++node) {
      made.push_back(take(DType::kF32, kM, kN));
      work.nodes[node] = made.back().raw();
    }
    run(work, nodes, a, b, 1);
    bool equal = true;
    for (int leaf = 0; leaf < 2 * nodes; ++leaf) {
      const int64_t first = leaf * kLeaf;
      multiply_bf16_in_order(
          stream_, {a, {first, first + kLeaf}, false, b.rows(first, first + kLeaf), false, expected, leaf % 2 == 1});
      if (leaf % 2 == 1) equal = equal && in_host(made[static_cast<size_t>(leaf) / 2]) == in_host(expected);
    }
    return equal;
  }

  std::vector<std::byte> in_host(const Tensor& tensor) const {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
    check_cuda(cudaMemcpyAsync(bytes.data(), tensor.raw(), bytes.size(), cudaMemcpyDeviceToHost, stream_.handle()),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_.handle()), "matmul_leaves");
    return bytes;
  }

  CudaStream& stream_;
  PFN_cuTensorMapEncodeTiled_v12000 encode_ = nullptr;
  int multiprocessors_ = 0;
  bool available_ = false;
};

}  // namespace

bool multiply_leaves(CudaStream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps, DType leaf,
                     std::span<const Tensor> nodes) {
  // Leaf by leaf a library's products are faster where leaves are long, the more so where there are but two: measured
  // by tools/bench_cuda. A leaf that is rounded takes a pass of its own there.
  const int64_t long_leaf = steps.size() == 2 && leaf == DType::kF32 ? 1024 : 4096;
  const int64_t m = a.dim(0), n = b.dim(1), k = a.dim(1);
  const bool taken = a.dtype() == DType::kBF16 && steps.size() > 1 && steps.size() <= kMostLeaves &&
                     k < long_leaf * std::ssize(steps) && k % 8 == 0 && n % 8 == 0 && std::max(m, n) < INT32_MAX / 2 &&
                     is_aligned({a.raw(), b.raw()}) &&
                     std::ranges::all_of(nodes, [](const Tensor& node) { return is_aligned({node.raw()}); });
  if (!taken) return false;
  Work work = work_of(a, b, leaf, nodes.front().dtype());
  int buffers = 0;
  for (const LeafStep& step : steps) {
    if (step.columns.empty() || step.columns.size() % 16 != 0) return false;
    work.leaf[work.leaves++] = {static_cast<int32_t>(step.columns.begin), static_cast<int32_t>(step.columns.size()),
                                static_cast<int16_t>(step.accumulate), static_cast<int16_t>(step.joins)};
    buffers = std::max(buffers, step.buffer + 1);
  }
  if (buffers > kMostNodes || !stream.attachment<LeafProducts>().available()) return false;
  for (size_t i = 0; i < nodes.size(); ++i) work.nodes[i] = nodes[i].raw();
  stream.attachment<LeafProducts>().run(work, buffers, a, b);
  return true;
}

}  // namespace invar::ops::cuda
