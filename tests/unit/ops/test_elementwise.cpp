#include <numeric>
#include <span>

#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/elementwise.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// Odd, and enough for two threads.
const int64_t kMany = 2 * cpu::kMinWorkPerThread + 13;

double rounded(double value, DType dtype) {
  const auto f = static_cast<float>(value);
  return static_cast<double>(dtype == DType::kF32 ? f : static_cast<float>(BF16(f)));
}

TEST_CASE("zero, of any dtype") {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI32}) {
    for (const Stream& stream : {kCpu, kTwoThreads}) {
      HostTensor x(dtype, {3, kMany});
      zero(stream, x.tensor().rows(1, 2));
      CHECK(x.same_bits([&] {
        HostTensor expected(dtype, {3, kMany});
        for (size_t i = 0; i < static_cast<size_t>(kMany); ++i) expected.set(static_cast<size_t>(kMany) + i, 0.0);
        return expected;
      }()));
    }
  }
}

TEST_CASE("copy converts between f32 and bf16, rounding to nearest even") {
  const DType from = GENERATE(DType::kF32, DType::kBF16), to = GENERATE(DType::kF32, DType::kBF16);
  const HostTensor x = random_tensor(from, {kMany}, 1);
  HostTensor one(to, {kMany}), two(to, {kMany});
  copy(kCpu, x, one);
  copy(kTwoThreads, x, two);
  Values expected = x.values();
  for (double& value : expected) value = rounded(value, to);
  CHECK(one.values() == expected);
  CHECK(two.same_bits(one));
}

TEST_CASE("copy to bf16 at ties and at the ends of the range") {
  // 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3·2^-8 between 1 + 2^-7 and 1 + 2^-6: both go to the even one.
  const HostTensor x(DType::kF32, {6}, {1 + 0x1p-8, 1 + 3 * 0x1p-8, -0.0, 3.4e38, 1e-40, std::nan("")});
  HostTensor y(DType::kBF16, {6});
  copy(kCpu, x, y);
  CHECK(y[0] == 1);
  CHECK(y[1] == 1 + 0x1p-6);
  CHECK((y[2] == 0 && std::signbit(y[2])));
  CHECK(std::isinf(y[3]));
  CHECK(y[4] == 0x1p-133);  // the least subnormal
  CHECK(std::isnan(y[5]));
}

TEST_CASE("heads go to another place, and nothing beside them changes") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  constexpr int64_t kTokens = 300, kGroups = 2, kHeads = 3, kDim = 10;
  const HostTensor source = random_tensor(dtype, {kTokens, 83}, 1), before = random_tensor(dtype, {kTokens, 71}, 2);
  for (const Stream& stream : {kCpu, kTwoThreads}) {
    HostTensor target = before;
    const HeadView from{source, kGroups, kHeads, kDim, 40, 11}, to{target, kGroups, kHeads, kDim, 33, 4};
    copy_heads(stream, from, to);
    HostTensor expected = before;
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t head = 0; head < kGroups * kHeads; ++head) {
        for (int64_t i = 0; i < kDim; ++i) {
          expected.set(static_cast<size_t>(to.index(token, head) + i),
                       source[static_cast<size_t>(from.index(token, head) + i)]);
        }
      }
    }
    CHECK(target.same_bits(expected));
    CHECK_FALSE(target.same_bits(before));
    HeadView fewer = to;
    fewer.groups = 1;
    CHECK(contains(message_of(ErrorKind::kFault, [&] { copy_heads(stream, from, fewer); }), "copy_heads: to holds 1"));
  }
}

TEST_CASE("add, every mix of dtypes, also into an operand") {
  const DType a_type = GENERATE(DType::kF32, DType::kBF16), b_type = GENERATE(DType::kF32, DType::kBF16),
              out_type = GENERATE(DType::kF32, DType::kBF16);
  HostTensor a = random_tensor(a_type, {kMany}, 1), b = random_tensor(b_type, {kMany}, 2);
  HostTensor one(out_type, {kMany}), two(out_type, {kMany});
  add(kCpu, a, b, one);
  add(kTwoThreads, a, b, two);
  Values expected(one.size());
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = rounded(a[i] + b[i], out_type);
  CHECK(one.values() == expected);
  CHECK(two.same_bits(one));
  if (a_type == out_type) {
    HostTensor in_place = a;
    add(kCpu, in_place, b, in_place);
    CHECK(in_place.same_bits(one));
  }
  if (b_type == out_type) {
    HostTensor in_place = b;
    add(kCpu, a, in_place, in_place);
    CHECK(in_place.same_bits(one));
  }
}

TEST_CASE("scale_by multiplies in place, rounded once") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const HostTensor x = random_tensor(dtype, {3, kMany}, 1, 4.0), factor(dtype, {1}, {0.0612});
  HostTensor one = x, two = x;
  scale_by(kCpu, factor, one.tensor().rows(1, 2));
  scale_by(kTwoThreads, factor, two.tensor().rows(1, 2));
  Values expected = x.values();
  for (size_t i = 0; i < static_cast<size_t>(kMany); ++i) {
    double& value = expected[static_cast<size_t>(kMany) + i];
    value = rounded(value * factor[0], dtype);
  }
  CHECK(one.values() == expected);
  CHECK(two.same_bits(one));
}

// The order that elementwise.h promises, written as nested loops over blocks, lanes and their terms.
double sum_in_order(const Values& terms) {
  const auto block_size = static_cast<size_t>(kSumBlock);
  double total = 0;
  for (size_t begin = 0; begin < terms.size(); begin += block_size) {
    const size_t end = std::min(terms.size(), begin + block_size);
    Values lanes(16);
    for (size_t lane = 0; lane < 16; ++lane) {
      for (size_t i = begin + lane; i < end; i += 16) lanes[lane] += terms[i];
    }
    for (size_t width = 8; width > 0; width /= 2) {
      for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    total += lanes[0];
  }
  return total;
}

double sum(const Stream& stream, const Tensor& x) {
  double total = 0;
  add_sum(stream, x, Tensor(&total, DType::kF64, stream.device(), {1}));
  return total;
}

double sum_of_squares(const Stream& stream, const Tensor& x) {
  double total = 0;
  add_sum_of_squares(stream, x, Tensor(&total, DType::kF64, stream.device(), {1}));
  return total;
}

TEST_CASE("add_sum and add_sum_of_squares add to what is there") {
  double total = 1.5;
  const HostTensor x(DType::kF32, {2}, {3, -4});
  const Tensor there(&total, DType::kF64, DeviceType::kCpu, {1});
  add_sum(kCpu, x, there);
  CHECK(total == 0.5);
  add_sum_of_squares(kCpu, x, there);
  CHECK(total == 25.5);
}

TEST_CASE("sum and sum_of_squares keep their order for any number of threads") {
  for (const int64_t n :
       {int64_t{1}, int64_t{15}, int64_t{707}, kSumBlock - 1, kSumBlock, kSumBlock + 1, 5 * kSumBlock + 4321}) {
    Values values = random_values(n, 1);  // of exponents so wide that the order shows in fp64
    for (size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 9) * 7);
    const HostTensor x(DType::kF32, {n}, values);
    values = x.values();
    Values squares = values;
    for (double& value : squares) value *= value;
    for (const int threads : {1, 2, 3, 7}) {
      const Stream stream(DeviceType::kCpu, threads);
      CHECK(sum(stream, x) == sum_in_order(values));
      CHECK(sum_of_squares(stream, x) == sum_in_order(squares));
    }
    long double exact = 0, exact_squares = 0, size = 0;
    for (const double value : values) {
      exact += static_cast<long double>(value);
      exact_squares += static_cast<long double>(value) * static_cast<long double>(value);
      size += std::abs(static_cast<long double>(value));
    }
    CHECK(std::abs(static_cast<long double>(sum(kCpu, x)) - exact) <= 1e-14L * size);
    CHECK(std::abs(static_cast<long double>(sum_of_squares(kCpu, x)) - exact_squares) <= 1e-14L * exact_squares);
    // Another order has other bits: the comparisons above can fail.
    if (n > 16) CHECK(std::accumulate(values.begin(), values.end(), 0.0) != sum_in_order(values));
  }
}

TEST_CASE("row_squares is each row's sum of squares, in the order of the row's length") {
  const int64_t columns = GENERATE(int64_t{1}, int64_t{17}, int64_t{4096}, kSumBlock + 5), rows = 9;
  Values values = random_values(rows * columns, 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 9) * 7);
  const HostTensor x(DType::kF32, {rows, columns}, values);
  const auto run = [&](int threads, int64_t begin) {
    Values out(static_cast<size_t>(rows - begin), -1.0);
    const std::vector<RowBlock> blocks = {{begin * columns, rows - begin, columns}};
    row_squares(Stream(DeviceType::kCpu, threads), x.tensor().view({rows * columns}), blocks, view_of(out));
    return out;
  };
  const Values sums = run(1, 0), of_last = run(1, rows - 1);
  CHECK(run(5, 0) == sums);
  CHECK(of_last[0] == sums.back());
  for (int64_t row = 0; row < rows; ++row) {
    Values squares;
    for (int64_t i = 0; i < columns; ++i) squares.push_back(std::pow(x[static_cast<size_t>(row * columns + i)], 2));
    CHECK(sums[static_cast<size_t>(row)] == sum_in_order(squares));
    CHECK(sums[static_cast<size_t>(row)] == sum_of_squares(kCpu, x.tensor().rows(row, row + 1)));
    if (columns == 4096) CHECK(std::accumulate(squares.begin(), squares.end(), 0.0) != sum_in_order(squares));
  }
}

TEST_CASE("row_squares goes through the blocks in turn, wherever they lie") {
  const HostTensor x = random_tensor(DType::kF32, {100}, 1);
  const std::vector<RowBlock> blocks = {{50, 3, 7}, {2, 2, 20}, {71, 4, 1}, {9, 0, 5}, {99, 1, 1}};
  Values sums(10, -1.0);
  row_squares(kCpu, x, blocks, view_of(sums));
  size_t row = 0;
  for (const RowBlock& block : blocks) {
    for (int64_t begin = block.begin; begin < block.end(); begin += block.columns) {
      CHECK(sums[row++] == sum_of_squares(kCpu, x.tensor().rows(begin, begin + block.columns)));
    }
  }
  CHECK(row == sums.size());
}

TEST_CASE("exact_sum has the digits of ExactSum") {
  Values values = random_values(1000, 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 5) * 8);
  ExactSum expected;
  for (const double value : values) expected.add(value);
  std::vector<int64_t> digits(ExactSum::kDigits, 7);
  exact_sum(kCpu, view_of(values), view_of(digits));
  CHECK(ExactSum::of_digits(std::span<const int64_t, ExactSum::kDigits>(digits)).value() == expected.value());
  CHECK(std::accumulate(values.begin(), values.end(), 0.0) != expected.value());
}

TEST_CASE("maximum takes the larger of each pair") {
  const HostTensor a = random_tensor(DType::kF32, {1003}, 1), b = random_tensor(DType::kF32, {1003}, 2);
  HostTensor out(DType::kF32, {1003});
  maximum(kCpu, a, b, out);
  for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == std::max(a[i], b[i]));
  maximum(kCpu, a, b, a);
  CHECK(a.same_bits(out));
}

TEST_CASE("elementwise operations of nothing, on meta, and of wrong operands") {
  const HostTensor none(DType::kF32, {0}), x(DType::kF32, {4}), y(DType::kF32, {2, 2}), ints(DType::kI32, {4});
  zero(kCpu, none);
  copy(kCpu, none, none);
  add(kCpu, none, none, none);
  scale_by(kCpu, HostTensor(DType::kF32, {1}), none);
  CHECK(sum(kCpu, none) == 0);
  CHECK(sum_of_squares(kCpu, none) == 0);

  Values no_squares(2, 1.0);
  const std::vector<RowBlock> empty = {{0, 2, 0}}, two = {{0, 2, 2}}, beyond = {{1, 2, 2}};
  row_squares(kCpu, none, empty, view_of(no_squares));
  CHECK(no_squares == Values(2, 0.0));

  const Tensor meta = x.on(DeviceType::kMeta);
  row_squares(kMeta, meta, two, HostTensor(DType::kF64, {2}).on(DeviceType::kMeta));
  zero(kMeta, meta);
  copy(kMeta, meta, meta);
  add(kMeta, meta, meta, meta);
  scale_by(kMeta, HostTensor(DType::kF32, {1}).on(DeviceType::kMeta), meta);
  CHECK(sum(kMeta, meta) == 0);
  CHECK(sum_of_squares(kMeta, meta) == 0);

  CHECK(contains(message_of(ErrorKind::kFault, [&] { copy(kCpu, x, y); }),
                 "copy: f32 (4) and f32 (2, 2) differ in shape"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { copy(kCpu, x, ints); }), "copy: no kernel for i32"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { add(kCpu, x, x, y); }),
                 "add: f32 (4) and f32 (2, 2) differ in shape"));
  const HostTensor bf16_factor(DType::kBF16, {1}), int_factor(DType::kI32, {1});
  CHECK(contains(message_of(ErrorKind::kFault, [&] { scale_by(kCpu, y, x); }),
                 "scale_by: factor is f32 (2, 2), expected f32 (1)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { scale_by(kCpu, bf16_factor, x); }), "factor is bf16 (1)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { scale_by(kCpu, int_factor, ints); }),
                 "scale_by: no kernel for i32"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { sum(kCpu, ints); }), "sum: x is i32 (4), expected f32"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { row_squares(kCpu, y, two, x); }), "row_squares: x is f32 (2, 2)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { row_squares(kCpu, x, two, x); }),
                 "row_squares: out is f32 (4), expected f64 (2)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { row_squares(kCpu, x, beyond, x); }),
                 "row_squares: 2 rows of 2 from element 1 of 4"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { zero(kMeta, x); }), "on cpu, but the stream is on meta"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { zero(Stream(DeviceType::kCuda), x.on(DeviceType::kCuda)); }),
                 "built without CUDA"));
}

}  // namespace
}  // namespace invar::ops
