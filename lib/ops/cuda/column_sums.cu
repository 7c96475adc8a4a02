#include "ops/cuda/column_sums.h"

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"

namespace invar::ops::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kSlices = 32;

// A thread sums a slice of the rows of one column in ascending order; slices are joined in ascending order.
__global__ void __launch_bounds__(kColumns* kSlices)
    column_sums_kernel(const float* partials, int64_t rows, int64_t columns, float* out) {
  __shared__ float sums[kSlices][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int64_t slice = (rows + kSlices - 1) / kSlices;
  const int64_t end = min(rows, (threadIdx.y + 1) * slice);
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = threadIdx.y * slice; row < end; ++row) sum += partials[row * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < kSlices; ++y) sum += sums[y][threadIdx.x];
  out[column] += sum;
}

}  // namespace

void add_column_sums(const Stream& stream, std::string_view op, const float* partials, int64_t rows, int64_t columns,
                     float* out) {
  if (columns == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(columns, kColumns));
  column_sums_kernel<<<blocks, dim3(kColumns, kSlices), 0, cuda_handle(stream)>>>(partials, rows, columns, out);
  check_launch(op);
}

}  // namespace invar::ops::cuda
