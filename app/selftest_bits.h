#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/range.h"
#include "device/arena.h"
#include "device/device.h"

namespace invar::app {

using Bits = std::vector<uint32_t>;  // of every element of a tensor

// Empty if all bits are equal, else "3 of 512 elements, first 17: 3f800001, expected 3f800000".
std::string difference(const Bits& actual, const Bits& expected);

// Normal floats that are a function of seed and index: a sign, an exponent of -spread to spread around `exponent`, and
// 23 bits of significand.
float random_float(uint64_t seed, int64_t index, int spread, int exponent = 0);

// Row-major numbers in host memory.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;

  Matrix(int64_t row_count, int64_t col_count)
      : rows(row_count), cols(col_count), values(static_cast<size_t>(row_count * col_count)) {}
  Matrix(int64_t row_count, int64_t col_count, uint64_t seed, int spread, int exponent = 0);

  float& at(int64_t row, int64_t col) { return values[static_cast<size_t>(row * cols + col)]; }
  float at(int64_t row, int64_t col) const { return values[static_cast<size_t>(row * cols + col)]; }
  Matrix part(Range row_range, Range col_range) const;
  Matrix transposed() const;
  // Each rounded to the dtype.
  Matrix rounded(DType dtype) const;
  Bits bits(DType dtype) const;
};

// Tensors on the stream's device for one check.
class Bench {
 public:
  explicit Bench(const Stream& stream);

  const Stream& stream() const { return stream_; }
  // Every byte is 0xff: no number, and no valid index.
  Tensor unwritten(DType dtype, std::initializer_list<int64_t> shape);
  // f32, bf16 or i32 of these values.
  Tensor filled(DType dtype, std::initializer_list<int64_t> shape, std::span<const float> values);
  Tensor matrix(DType dtype, const Matrix& matrix) { return filled(dtype, {matrix.rows, matrix.cols}, matrix.values); }
  // Waits for the device.
  Bits bits(const Tensor& tensor) const;

 private:
  const Stream& stream_;
  Arena arena_;
};

}  // namespace invar::app
