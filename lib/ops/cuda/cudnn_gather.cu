#include "device/cuda/cuda_stream.h"
#include "ops/cuda/cudnn_gather.h"

namespace invar::ops::cuda {
namespace {

constexpr int kTile = 32;
constexpr int kTileRows = 8;  // rows of a tile that a block moves at once

__global__ void __launch_bounds__(kTile* kTileRows)
    transpose(const float* __restrict__ from, float* __restrict__ to, int64_t rows, int64_t cols) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t matrix = blockIdx.z * rows * cols;
  const int64_t first_row = int64_t{blockIdx.y} * kTile;
  const int64_t first_col = int64_t{blockIdx.x} * kTile;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t row = first_row + y;
    const int64_t col = first_col + x;
    if (row < rows && col < cols) tile[y][x] = from[matrix + row * cols + col];
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t row = first_row + x;
    const int64_t col = first_col + y;
    if (row < rows && col < cols) to[matrix + col * rows + row] = tile[x][y];
  }
}

unsigned tiles(int64_t n) {
  return static_cast<unsigned>((n + kTile - 1) / kTile);
}

}  // namespace

void transpose_batch(const Stream& stream, const float* from, float* to, int64_t batch, int64_t rows, int64_t cols) {
  if (batch * rows * cols == 0) return;
  const dim3 grid(tiles(cols), tiles(rows), static_cast<unsigned>(batch));
  transpose<<<grid, dim3(kTile, kTileRows), 0, cuda_handle(stream)>>>(from, to, rows, cols);
  check_launch("transpose_batch");
}

}  // namespace invar::ops::cuda
