#pragma once

#include "ops/cuda/attention_device.cuh"
#include "ops/cuda/tensor_core.cuh"

// Attention on tensor cores, bf16. A warp owns 16 rows, or 32, of its block's tile and keeps their scores in registers,
// where the probabilities of one product are as the next one takes them. In backward the gradients to keys and values
// and those to queries are summed by kernels of their own: scores are computed twice, and nothing is added atomically.
namespace invar::ops::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Least shared memory per block with which every head_dim has tiles: A100 gives 163 KB, H100 227 KB.
constexpr int kTiledAttentionSharedBytes = 163 << 10;

using InputHeads = DeviceHeads<const __nv_bfloat16>;
using OutputHeads = DeviceHeads<__nv_bfloat16>;

// The rows of a thread in its warp's tile: row(i), i = 0 and 1; and the first of its two columns in each 8.
struct LanePlace {
  int lane = static_cast<int>(threadIdx.x) % 32;
  int warp = static_cast<int>(threadIdx.x) / 32;

  __device__ int row(int i) const { return lane / 4 + 8 * i; }
  __device__ int column() const { return lane % 4 * 2; }
};

__device__ inline void store_pair(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<uint32_t*>(to) = pack_bf16(a, b);
}
__device__ inline void store_pair(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = make_float2(a, b);
}

// Rows that exist, columns [slice, slice + 8 kN) that exist; factor(m, i) multiplies row 16 m + row(i) of the warp.
template <int kM, int kN, class Out, class Factor>
__device__ void store_warp_tile(const WarpTile<kM, kN>& tile, const DeviceHeads<Out>& heads, int64_t token, int head,
                                int first_row, int rows, int slice, Factor factor) {
  const LanePlace place;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 16 * m + place.row(i);
      if (row >= rows) continue;
      Out* to = heads.at(token + row, head) + slice + place.column();
      const float scale = factor(m, i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (slice + 8 * n >= heads.head_dim) continue;
        store_pair(to + 8 * n, scale * tile.at[m][n][2 * i], scale * tile.at[m][n][2 * i + 1]);
      }
    }
  }
}

// Launches a kernel that may need more shared memory than blocks have without asking.
template <class Kernel, class... Arguments>
void launch_tiles(const Stream& stream, const char* op, Kernel kernel, dim3 grid, int threads, int shared_bytes,
                  const Arguments&... arguments) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), op);
  kernel<<<grid, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), cuda_handle(stream)>>>(
      arguments...);
  check_launch(op);
}

template <class Tiles>
dim3 tiles_grid(const AttentionSizes& sizes, int heads) {
  return dim3(attention_blocks(sizes, heads, Tiles::kRows),
              static_cast<unsigned>((sizes.head_dim + Tiles::kSlice - 1) / Tiles::kSlice));
}

// Shared memory that a block of the stream's GPU can have.
inline int shared_bytes_per_block(int device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

struct TiledForward {
  AttentionSizes sizes;
  InputHeads q, k, v;
  OutputHeads out;
  float* lse;
};
void launch_tiled_forward(const Stream& stream, const TiledForward& call);

struct TiledBackward {
  AttentionSizes sizes;
  InputHeads q, k, v, d_out;
  const float* lse;
  const float* delta;
  int row_heads;  // of lse and delta
  OutputHeads d_q, d_k, d_v;
  // If set, each query head's terms of d_k and d_v go here instead.
  DeviceHeads<float> k_terms{}, v_terms{};
};
void launch_tiled_backward(const Stream& stream, const TiledBackward& call);

}  // namespace invar::ops::cuda
