#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/elementwise.h"

namespace invar::ops {
namespace {

using namespace invar::test;
using Values = std::vector<double>;

const Stream kCpu(DeviceType::kCpu);
const Stream kTwoThreads(DeviceType::kCpu, 2);
const Stream kMeta(DeviceType::kMeta);

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

TEST_CASE("scale") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  HostTensor one = random_tensor(dtype, {kMany}, 1), two = one;
  Values expected = one.values();
  for (double& value : expected) value = rounded(value * static_cast<double>(0.3f), dtype);
  scale(kCpu, one, 0.3f);
  scale(kTwoThreads, two, 0.3f);
  CHECK(one.values() == expected);
  CHECK(two.same_bits(one));
}

TEST_CASE("sum and sum_of_squares are fp64 chains of ascending elements") {
  Values values = random_values(707, 1);  // of exponents so wide that the order shows in fp64
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 9) * 7);
  const HostTensor x(DType::kF32, {101, 7}, values);
  double ascending = 0, squares = 0, descending = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    ascending += x[i];
    squares += x[i] * x[i];
    descending += x[x.size() - 1 - i];
  }
  CHECK(sum(kCpu, x) == ascending);
  CHECK(sum(kTwoThreads, x) == ascending);
  CHECK(sum_of_squares(kTwoThreads, x) == squares);
  CHECK(ascending != descending);
}

TEST_CASE("elementwise operations of nothing, on meta, and of wrong operands") {
  const HostTensor none(DType::kF32, {0}), x(DType::kF32, {4}), y(DType::kF32, {2, 2}), ints(DType::kI32, {4});
  zero(kCpu, none);
  copy(kCpu, none, none);
  add(kCpu, none, none, none);
  scale(kCpu, none, 2.0f);
  CHECK(sum(kCpu, none) == 0);
  CHECK(sum_of_squares(kCpu, none) == 0);

  const Tensor meta = x.on(DeviceType::kMeta);
  zero(kMeta, meta);
  copy(kMeta, meta, meta);
  add(kMeta, meta, meta, meta);
  scale(kMeta, meta, 2.0f);
  CHECK(sum(kMeta, meta) == 0);
  CHECK(sum_of_squares(kMeta, meta) == 0);

  CHECK(contains(fault_of([&] { copy(kCpu, x, y); }), "copy: f32 (4) and f32 (2, 2) differ in shape"));
  CHECK(contains(fault_of([&] { copy(kCpu, x, ints); }), "copy: no kernel for i32"));
  CHECK(contains(fault_of([&] { add(kCpu, x, x, y); }), "add: f32 (4) and f32 (2, 2) differ in shape"));
  CHECK(contains(fault_of([&] { scale(kCpu, ints, 2.0f); }), "scale: no kernel for i32"));
  CHECK(contains(fault_of([&] { sum(kCpu, ints); }), "sum: x is i32 (4), expected f32"));
  CHECK(contains(fault_of([&] { zero(kMeta, x); }), "on cpu, but the stream is on meta"));
  CHECK(contains(fault_of([&] { zero(Stream(DeviceType::kCuda), x.on(DeviceType::kCuda)); }), "built without CUDA"));
}

}  // namespace
}  // namespace invar::ops
