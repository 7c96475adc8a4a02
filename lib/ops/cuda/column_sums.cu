#include "ops/cuda/column_sums.h"

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"

namespace invar::ops::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kSlices = 32;
constexpr int kThreads = 256;

// A thread sums a slice of the rows of one column in ascending order; slices are joined in ascending order.
__global__ void __launch_bounds__(kColumns* kSlices)
    column_sums_kernel(const float* terms, int64_t rows, int64_t columns, float* out) {
  __shared__ float sums[kSlices][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x;
  const int64_t slice = (rows + kSlices - 1) / kSlices;
  const int64_t end = min(rows, (threadIdx.y + 1) * slice);
  terms += blockIdx.x * rows * columns;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = threadIdx.y * slice; row < end; ++row) sum += terms[row * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < kSlices; ++y) sum += sums[y][threadIdx.x];
  out[blockIdx.x * columns + column] += sum;
}

__global__ void __launch_bounds__(kThreads)
    ascending_rows_kernel(const float* terms, int64_t rows, int64_t columns, float* out) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= columns) return;
  terms += blockIdx.x * rows * columns + column;
  float sum = terms[0];
#pragma unroll 8
  for (int64_t row = 1; row < rows; ++row) sum += terms[row * columns];
  out[blockIdx.x * columns + column] += sum;
}

}  // namespace

void add_column_sums(const Stream& stream, std::string_view op, const float* terms, int64_t sums, int64_t rows,
                     int64_t columns, float* out) {
  if (sums == 0 || columns == 0) return;
  const bool sliced =
      rows > kSlices;  // else slices of one row: ascending order, for which a block need not be so large
  const dim3 grid(static_cast<unsigned>(sums), static_cast<unsigned>(ceil_div(columns, sliced ? kColumns : kThreads)));
  if (sliced) {
    column_sums_kernel<<<grid, dim3(kColumns, kSlices), 0, cuda_handle(stream)>>>(terms, rows, columns, out);
  } else {
    ascending_rows_kernel<<<grid, kThreads, 0, cuda_handle(stream)>>>(terms, rows, columns, out);
  }
  check_launch(op);
}

}  // namespace invar::ops::cuda
