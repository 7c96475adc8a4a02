#include "app/selftest_bits.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/format.h"
#include "core/split_mix.h"

namespace invar::app {
namespace {

constexpr int64_t kBenchBytes = int64_t{512} << 20;

// The elements as a dtype stores them.
std::vector<std::byte> stored(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto put = [&](auto element) { std::memcpy(bytes.data() + i * sizeof element, &element, sizeof element); };
    if (dtype == DType::kF32) {
      put(values[i]);
    } else if (dtype == DType::kBF16) {
      put(BF16(values[i]));
    } else {
      INVAR_CHECK(dtype == DType::kI32, "selftest: no values of {}", name_of(dtype));
      put(static_cast<int32_t>(values[i]));
    }
  }
  return bytes;
}

Bits bits_of(DType dtype, const std::vector<std::byte>& bytes) {
  const auto size = static_cast<size_t>(size_of(dtype));
  Bits bits(bytes.size() / size);
  for (size_t i = 0; i < bits.size(); ++i) std::memcpy(&bits[i], bytes.data() + i * size, size);
  return bits;
}

}  // namespace

std::string difference(const Bits& actual, const Bits& expected) {
  if (actual.size() != expected.size()) return format("{} elements, expected {}", actual.size(), expected.size());
  size_t unlike = 0;
  size_t first = 0;
  for (size_t i = actual.size(); i-- > 0;) {
    if (actual[i] == expected[i]) continue;
    ++unlike;
    first = i;
  }
  if (unlike == 0) return "";
  return format("{} of {} elements, first {}: {:08x}, expected {:08x}", unlike, actual.size(), first, actual[first],
                expected[first]);
}

float random_float(uint64_t seed, int64_t index, int spread, int exponent) {
  const uint64_t bits = split_mix(split_mix(seed) + static_cast<uint64_t>(index));
  const auto choices = static_cast<uint32_t>(2 * spread + 1);
  const auto chosen = static_cast<int>(static_cast<uint32_t>(bits >> 40) % choices) - spread;
  const auto biased = static_cast<uint32_t>(127 + exponent + chosen);
  const auto low = static_cast<uint32_t>(bits);
  return std::bit_cast<float>((low & 0x8000'0000u) | biased << 23 | (low & 0x007f'ffffu));
}

Matrix::Matrix(int64_t row_count, int64_t col_count, uint64_t seed, int spread, int exponent)
    : Matrix(row_count, col_count) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = random_float(seed, static_cast<int64_t>(i), spread, exponent);
  }
}

Matrix Matrix::part(Range row_range, Range col_range) const {
  Matrix out(row_range.size(), col_range.size());
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t col = 0; col < out.cols; ++col) out.at(row, col) = at(row_range.begin + row, col_range.begin + col);
  }
  return out;
}

Matrix Matrix::transposed() const {
  Matrix out(cols, rows);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) out.at(col, row) = at(row, col);
  }
  return out;
}

Matrix Matrix::rounded(DType dtype) const {
  Matrix out = *this;
  if (dtype == DType::kBF16) {
    for (float& value : out.values) value = static_cast<float>(BF16(value));
  }
  return out;
}

Bits Matrix::bits(DType dtype) const {
  return bits_of(dtype, stored(dtype, values));
}

Bench::Bench(const Stream& stream) : stream_(stream), arena_("selftest", stream.device(), kBenchBytes) {}

Tensor Bench::unwritten(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor tensor = arena_.allocate("operand", dtype, shape);
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()), std::byte{0xff});
  copy_across(stream_, Tensor(bytes.data(), dtype, DeviceType::kCpu, tensor.shape()), tensor);
  return tensor;
}

Tensor Bench::filled(DType dtype, std::initializer_list<int64_t> shape, std::span<const float> values) {
  const Tensor tensor = arena_.allocate("operand", dtype, shape);
  std::vector<std::byte> bytes = stored(dtype, values);
  INVAR_CHECK(std::ssize(values) == tensor.numel(), "selftest: {} values for {}", values.size(), tensor.describe());
  copy_across(stream_, Tensor(bytes.data(), dtype, DeviceType::kCpu, tensor.shape()), tensor);
  return tensor;
}

Bits Bench::bits(const Tensor& tensor) const {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
  copy_across(stream_, tensor, Tensor(bytes.data(), tensor.dtype(), DeviceType::kCpu, tensor.shape()));
  synchronize(stream_);
  return bits_of(tensor.dtype(), bytes);
}

}  // namespace invar::app
