#pragma once

// The inner kernels of the CPU matrix product: one register tile of c over one block of k.
//
// A kernel K updates a tile of Rows <= K::kRows rows and K::kCols columns, stored densely with a row stride of
// K::kCols:
//   tile[i][j] = fma(a[k][i], b[k][j], tile[i][j]) for k = 0 .. depth - 1, in this order,
// from packed panels a (depth, K::kRows) and b (depth, K::kCols). The chain starts from zero unless `resume` is set.
// Fused multiply-adds are explicit, so that no compiler flag changes a bit.

#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace invar::ops::cpu {

struct PortableKernel {
  static constexpr int kRows = 4;
  static constexpr int kCols = 16;

  template <int Rows>
  static void run(int64_t depth, const float* a, const float* b, float* tile, bool resume) {
    float sum[Rows][kCols];
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < kCols; ++j) sum[i][j] = resume ? tile[i * kCols + j] : 0.0f;
    }
    for (int64_t k = 0; k < depth; ++k, a += kRows, b += kCols) {
      for (int i = 0; i < Rows; ++i) {
        for (int j = 0; j < kCols; ++j) sum[i][j] = std::fma(a[i], b[j], sum[i][j]);
      }
    }
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < kCols; ++j) tile[i * kCols + j] = sum[i][j];
    }
  }
};

#if defined(__x86_64__)

// 12 of 16 registers hold the tile: two FMA pipes of latency 4 need at least 8 independent chains.
struct Avx2Kernel {
  static constexpr int kRows = 6;
  static constexpr int kCols = 16;

  template <int Rows>
  [[gnu::target("avx2,fma")]] static void run(int64_t depth, const float* a, const float* b, float* tile, bool resume) {
    __m256 sum[Rows][2];
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      sum[i][0] = resume ? _mm256_load_ps(tile + i * kCols) : _mm256_setzero_ps();
      sum[i][1] = resume ? _mm256_load_ps(tile + i * kCols + 8) : _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < depth; ++k, a += kRows, b += kCols) {
      const __m256 b0 = _mm256_load_ps(b);
      const __m256 b1 = _mm256_load_ps(b + 8);
#pragma GCC unroll 6
      for (int i = 0; i < Rows; ++i) {
        const __m256 ai = _mm256_broadcast_ss(a + i);
        sum[i][0] = _mm256_fmadd_ps(ai, b0, sum[i][0]);
        sum[i][1] = _mm256_fmadd_ps(ai, b1, sum[i][1]);
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      _mm256_store_ps(tile + i * kCols, sum[i][0]);
      _mm256_store_ps(tile + i * kCols + 8, sum[i][1]);
    }
  }
};

// 28 of 32 registers hold the tile.
struct Avx512Kernel {
  static constexpr int kRows = 14;
  static constexpr int kCols = 32;

  template <int Rows>
  [[gnu::target("avx512f")]] static void run(int64_t depth, const float* a, const float* b, float* tile, bool resume) {
    __m512 sum[Rows][2];
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      sum[i][0] = resume ? _mm512_load_ps(tile + i * kCols) : _mm512_setzero_ps();
      sum[i][1] = resume ? _mm512_load_ps(tile + i * kCols + 16) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < depth; ++k, a += kRows, b += kCols) {
      const __m512 b0 = _mm512_load_ps(b);
      const __m512 b1 = _mm512_load_ps(b + 16);
#pragma GCC unroll 14
      for (int i = 0; i < Rows; ++i) {
        const __m512 ai = _mm512_set1_ps(a[i]);
        sum[i][0] = _mm512_fmadd_ps(ai, b0, sum[i][0]);
        sum[i][1] = _mm512_fmadd_ps(ai, b1, sum[i][1]);
      }
    }
#pragma GCC unroll 14
    for (int i = 0; i < Rows; ++i) {
      _mm512_store_ps(tile + i * kCols, sum[i][0]);
      _mm512_store_ps(tile + i * kCols + 16, sum[i][1]);
    }
  }
};

#endif

}  // namespace invar::ops::cpu
