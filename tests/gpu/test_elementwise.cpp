#include <random>

#include "like_cpu.h"
#include "ops/elementwise.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// Element counts: of whole packs of 16 bytes and not, of several blocks and of many.
#define SIZES 0, 1, 3, 8, 1000, 1024, 4099, (1 << 20) + 5

TEST_CASE("zero on the GPU reaches every byte of a tensor and none beside it") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(SIZES);
  const HostTensor before = random_tensor(dtype, {n + 2}, 1, 0.5, 1.0);
  const DeviceTensor x(before);
  zero(gpu(), x.tensor().rows(1, n + 1));
  Values expected = before.values();
  std::fill(expected.begin() + 1, expected.end() - 1, 0.0);
  CHECK(x.host().values() == expected);
}

TEST_CASE("copy on the GPU gives the CPU's bits") {
  const DType from = GENERATE(DType::kF32, DType::kBF16), to = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(SIZES), begin = GENERATE(0, 1);
  const HostTensor source = random_tensor(from, {n + begin}, 1);
  HostTensor expected(to, {n + begin});
  const DeviceTensor device_source(source), device_target(expected);
  const auto part = [&](const Tensor& whole) { return whole.rows(begin, n + begin); };
  copy(kCpu, part(source), part(expected));
  copy(gpu(), part(device_source), part(device_target));
  CHECK(device_target.host().same_bits(expected));
}

TEST_CASE("heads go to the same place on the GPU as on the CPU") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t head_dim = GENERATE(7, 8, 256), offset = GENERATE(0, 8, 11), tokens = GENERATE(0, 1, 300);
  constexpr int64_t kGroups = 2, kHeads = 3;
  const int64_t stride = (kHeads + 2) * head_dim;
  const HostTensor source = random_tensor(dtype, {tokens, kGroups * stride + 16}, 1);
  const HostTensor expected = random_tensor(dtype, {tokens, kGroups * kHeads * head_dim + 16}, 2);
  const DeviceTensor device_source(source), device_target(expected);
  const auto from = [&](const Tensor& buffer) { return HeadView{buffer, kGroups, kHeads, head_dim, stride, offset}; };
  const auto to = [&](const Tensor& buffer) {
    return HeadView{buffer, kGroups, kHeads, head_dim, kHeads * head_dim, 0};
  };
  copy_heads(kCpu, from(source), to(expected));
  copy_heads(gpu(), from(device_source), to(device_target));
  CHECK(device_target.host().same_bits(expected));
}

TEST_CASE("add on the GPU gives the CPU's bits, also where out is an operand") {
  const DType a_type = GENERATE(DType::kF32, DType::kBF16), b_type = GENERATE(DType::kF32, DType::kBF16);
  const DType out_type = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(SIZES), begin = GENERATE(0, 1);
  const HostTensor a = random_tensor(a_type, {n + begin}, 1), b = random_tensor(b_type, {n + begin}, 2);
  HostTensor out(out_type, {n + begin});
  const DeviceTensor device_a(a), device_b(b), device_out(out);
  const auto part = [&](const Tensor& whole) { return whole.rows(begin, n + begin); };
  add(kCpu, part(a), part(b), part(out));
  add(gpu(), part(device_a), part(device_b), part(device_out));
  CHECK(device_out.host().same_bits(out));

  const HostTensor in_place = b;
  add(kCpu, part(a), part(in_place), part(in_place));
  add(gpu(), part(device_a), part(device_b), part(device_b));
  CHECK(device_b.host().same_bits(in_place));
}

TEST_CASE("scale_by on the GPU gives the CPU's bits") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(SIZES), begin = GENERATE(0, 1);
  const HostTensor x = random_tensor(dtype, {n + begin}, 1), factor(dtype, {1}, {0.7});
  const DeviceTensor device_x(x), device_factor(factor);
  scale_by(kCpu, factor, x.tensor().rows(begin, n + begin));
  scale_by(gpu(), device_factor, device_x.tensor().rows(begin, n + begin));
  CHECK(device_x.host().same_bits(x));
}

using Sum = void (*)(const Stream&, const Tensor&, const Tensor&);

// The total after the op added to a total of `start`.
double total_after(Sum sum, const Stream& stream, const Tensor& x, double start) {
  std::vector<double> total{start};
  if (stream.device() == DeviceType::kCpu) {
    sum(stream, x, view_of(total));
    return total[0];
  }
  const DeviceTensor device(view_of(total));
  sum(stream, x, device);
  copy_across(stream, device, view_of(total));
  return total[0];
}

TEST_CASE("sums on the GPU are fp64, and their bits depend on the size alone") {
  const Sum sum = GENERATE(as<Sum>{}, add_sum_of_squares, add_sum);
  const int64_t n = GENERATE(SIZES, 6 << 20);
  const Values values = random_values(n, 1, 1.0, 0.25);
  Values shifted = values;
  shifted.insert(shifted.begin(), 1e30);  // outside of what is summed
  const HostTensor x(DType::kF32, {n}, values), moved(DType::kF32, {n + 1}, shifted);
  const DeviceTensor device(x), device_moved(moved);
  const double total = total_after(sum, gpu(), device, 3.0);
  CHECK(total == Approx(total_after(sum, kCpu, x, 3.0)).epsilon(1e-13));
  CHECK(total_after(sum, gpu(), device, 3.0) == total);
  CHECK(total_after(sum, gpu(), from_second(device_moved, {n}), 3.0) == total);
}

Values row_squares_of(const Stream& stream, const Tensor& x, const std::vector<RowBlock>& blocks) {
  int64_t rows = 0;
  for (const RowBlock& block : blocks) rows += block.rows;
  Values out(static_cast<size_t>(rows), -1.0);
  if (stream.device() == DeviceType::kCpu) {
    row_squares(stream, x, blocks, view_of(out));
    return out;
  }
  const DeviceTensor sums(view_of(out));
  row_squares(stream, x, blocks, sums);
  copy_across(stream, sums, view_of(out));
  return out;
}

TEST_CASE("row_squares on the GPU: the bits of a row depend on its elements alone") {
  const int64_t columns = GENERATE(1, 7, 1024, 4096, 4099, 8192, 8193, (1 << 18) + 5), rows = GENERATE(1, 5);
  const int64_t first = GENERATE(0, 3);  // which moves the rows off their alignment
  const HostTensor x = random_tensor(DType::kF32, {first + rows * columns}, 1, 1.0, 0.25);
  const DeviceTensor device(x);
  const Values sums = row_squares_of(gpu(), device, {{first, rows, columns}}),
               expected = row_squares_of(kCpu, x, {{first, rows, columns}});
  for (int64_t row = 0; row < rows; ++row) {
    const auto i = static_cast<size_t>(row);
    CHECK(sums[i] == Approx(expected[i]).epsilon(1e-13));
    const DeviceTensor alone(HostTensor(DType::kF32, {columns}, [&] {
      const Values all = x.values();
      return Values(all.begin() + first + row * columns, all.begin() + first + (row + 1) * columns);
    }()));
    CHECK(row_squares_of(gpu(), alone, {{0, 1, columns}})[0] == sums[i]);
  }
  CHECK(row_squares_of(gpu(), device, {{0, 2, 0}}) == Values(2, 0.0));
}

TEST_CASE("row_squares on the GPU of more blocks than a launch takes, long rows among them") {
  std::vector<RowBlock> blocks;
  int64_t n = 0;
  for (int64_t i = 0; i < 400; ++i) {
    const int64_t columns = i % 90 == 89 ? 8193 + i : 1 + i * 37 % 300;
    blocks.push_back({n, i % 4, columns});
    n = blocks.back().end() + i % 3;
  }
  const HostTensor x = random_tensor(DType::kF32, {n}, 1);
  const DeviceTensor device(x);
  const Values sums = row_squares_of(gpu(), device, blocks), expected = row_squares_of(kCpu, x, blocks);
  REQUIRE(sums.size() == 600);
  for (size_t row = 0; row < sums.size(); ++row) CHECK(sums[row] == Approx(expected[row]).epsilon(1e-13));
  Values apart;
  for (const RowBlock& block : blocks) {
    const Values alone = row_squares_of(gpu(), device, {block});
    apart.insert(apart.end(), alone.begin(), alone.end());
  }
  CHECK(apart == sums);
}

TEST_CASE("exact_sum on the GPU is the same number") {
  const int64_t n = GENERATE(0, 1, 1000, 300001);
  Values values(static_cast<size_t>(n));
  std::mt19937_64 random(5);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(static_cast<double>(random()) - 0x1p63, static_cast<int>(random() % 300) - 1130);
  }
  const auto sum_with = [&] {
    std::vector<int64_t> digits(ExactSum::kDigits, 7);
    const DeviceTensor device_values(view_of(values)), device_digits(view_of(digits));
    exact_sum(gpu(), device_values, device_digits);
    copy_across(gpu(), device_digits, view_of(digits));
    return ExactSum::of_digits(std::span<const int64_t, ExactSum::kDigits>(digits)).value();
  };
  ExactSum expected;
  for (const double value : values) expected.add(value);
  CHECK(sum_with() == expected.value());
  if (n < 1000) return;
  values[7] = INFINITY;
  CHECK(sum_with() == INFINITY);
  values[8] = -INFINITY;
  CHECK(std::isnan(sum_with()));
}

TEST_CASE("maximum on the GPU") {
  const int64_t n = GENERATE(1, 4096, 70001);
  const HostTensor a = random_tensor(DType::kF32, {n}, 1), b = random_tensor(DType::kF32, {n}, 2);
  const HostTensor expected(DType::kF32, {n});
  maximum(kCpu, a, b, expected);
  const DeviceTensor device_a(a), device_b(b);
  maximum(gpu(), device_a, device_b, device_a);
  CHECK(device_a.host().same_bits(expected));
}

}  // namespace
}  // namespace invar::ops
