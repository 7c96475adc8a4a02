#include "device/cuda/cuda_stream.h"
#include "ops/cuda/cudnn_gather.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kVector = 8;  // bf16 in 16 bytes

// The heads of one group lie one after another: a row is `groups` runs of `run` vectors.
struct Runs {
  uint4* first;
  int64_t row;
  int64_t group;
};

// A block per token.
__global__ void __launch_bounds__(kThreads) copy_runs(Runs from, Runs to, int row_vectors, int run) {
  const int64_t token = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < row_vectors; i += kThreads) {
    const int group = i / run;
    const int rest = i - group * run;
    to.first[token * to.row + group * to.group + rest] = from.first[token * from.row + group * from.group + rest];
  }
}

Runs runs_of(const HeadView& view) {
  return {reinterpret_cast<uint4*>(view.buffer.data<BF16>() + view.offset), view.token_stride() / kVector,
          view.group_stride / kVector};
}

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

void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to) {
  if (from.tokens() == 0) return;
  const auto run = static_cast<int>(from.heads_per_group * from.head_dim / kVector);
  const int row_vectors = static_cast<int>(from.groups) * run;
  copy_runs<<<static_cast<unsigned>(from.tokens()), kThreads, 0, cuda_handle(stream)>>>(runs_of(from), runs_of(to),
                                                                                        row_vectors, run);
  check_launch("copy_heads");
}

void transpose_batch(const Stream& stream, const float* from, float* to, int64_t batch, int64_t rows, int64_t cols) {
  if (batch * rows * cols == 0) return;
  const dim3 grid(tiles(cols), tiles(rows), static_cast<unsigned>(batch));
  transpose<<<grid, dim3(kTile, kTileRows), 0, cuda_handle(stream)>>>(from, to, rows, cols);
  check_launch("transpose_batch");
}

}  // namespace invar::ops::cuda
