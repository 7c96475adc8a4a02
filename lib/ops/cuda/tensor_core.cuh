#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// The instructions of tensor cores on bf16 (sm_80 and up), and tiles in shared memory laid out for them.
namespace invar::ops::cuda {

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 or 4 bytes to shared memory, or zeros if the source does not exist; done after cp_async_wait().
template <int kBytes>
__device__ void cp_async(uint32_t to, const void* from, bool exists) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
  } else {
    static_assert(kBytes == 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
  }
}
__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// This thread's copies are done but for those of the last kPending commits.
template <int kPending>
__device__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 × 8 matrices; lane i gives the address of row i % 8 of matrix i / 8. Of each matrix lane i gets elements
// 2·(i % 4) and the next of row i / 4, or of column i / 4 if transposed.
__device__ inline void load_matrices(uint32_t address, uint32_t (&matrix)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t address, uint32_t (&matrix)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(address)
               : "memory");
}

// c (16 × 8) += a (16 × 16) · b (16 × 8). With g = lane / 4 and t = lane % 4, c holds rows g (c[0], c[1]) and g + 8
// (c[2], c[3]), columns 2t and 2t + 1.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, relative error 2^-22.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Rows of kColumns bf16 in shared memory, from an address that 128 divides. The 16-byte chunks of a row are permuted by
// the row, so that a column of chunks of 8 rows meets every bank once.
template <int kColumns>
struct SwizzledTile {
  static_assert(kColumns % 64 == 0);
  static constexpr int kRowBytes = 2 * kColumns;

  uint32_t address;

  __device__ uint32_t chunk(int row, int index) const {
    return address + static_cast<uint32_t>(row * kRowBytes + ((index ^ (row & 7)) << 4));
  }
  // The address of chunk index + offset from that of chunk `index`, where the two have no bit in common: one register
  // holds what a lane reads over a whole product.
  static __device__ uint32_t moved(uint32_t chunk, int offset) {
    return (chunk ^ static_cast<uint32_t>((offset & 7) << 4)) + static_cast<uint32_t>((offset & ~7) << 4);
  }
  __device__ uint32_t end(int rows) const { return address + static_cast<uint32_t>(rows * kRowBytes); }
};

// Starts to copy kRows rows; those from `count` on, and columns from `columns` (a multiple of 8) on, become zeros.
template <int kRows, int kThreads, int kColumns>
__device__ void copy_rows_async(const __nv_bfloat16* from, int64_t stride, int count, int columns,
                                SwizzledTile<kColumns> to) {
  constexpr int kChunks = kColumns / 8;
  constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int first = static_cast<int>(threadIdx.x) / kChunks;
  const __nv_bfloat16* source = from + first * stride + 8 * chunk;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const bool exists = first + i < count && 8 * chunk < columns;
    cp_async<16>(to.chunk(first + i, chunk), exists ? source : from, exists);
    source += kStep * stride;
  }
}

// Tiles of 16 kM rows and 8 kN columns in the registers of a warp, as multiply_add() holds them.
template <int kM, int kN>
struct WarpTile {
  float at[kM][kN][4] = {};

  // += rows first_row.. of left · right's rowsᵀ.
  template <int kColumns>
  __device__ void add_row_products(SwizzledTile<kColumns> left, int first_row, SwizzledTile<kColumns> right) {
    using Tile = SwizzledTile<kColumns>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t a_chunk = left.chunk(first_row + lane % 16, lane / 16);
    const uint32_t b_chunk = right.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrices(Tile::moved(a_chunk, 2 * k) + 16 * m * Tile::kRowBytes, a[m]);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        load_matrices(Tile::moved(b_chunk, 2 * k) + 8 * n * Tile::kRowBytes, b);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_add(at[m][n], a[m], b[0], b[1]);
          multiply_add(at[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // += weights, rounded to bf16, · rows, columns from first_column, a multiple of 8 kN, on.
  template <int kWeights, int kColumns>
  __device__ void add_weighted_rows(const WarpTile<kM, kWeights>& weights, SwizzledTile<kColumns> rows,
                                    int first_column) {
    using Tile = SwizzledTile<kColumns>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t chunk = rows.chunk(lane % 16, first_column / 8 + lane / 16);
#pragma unroll
    for (int k = 0; k < kWeights; k += 2) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &weights.at[m][k + i / 2][i % 2 * 2];
          a[m][i] = pack_bf16(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(Tile::moved(chunk, n) + 8 * k * Tile::kRowBytes, b);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_add(at[m][n], a[m], b[0], b[1]);
          multiply_add(at[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace invar::ops::cuda
