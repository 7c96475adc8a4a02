#include "ops/tree_sum.h"

#include <cmath>

#include "host_tensor.h"
#include "ops/cpu/parallel.h"

namespace invar::ops {
namespace {

using namespace invar::test;

struct Term {
  int64_t row;
  int joins;
};
SumProgram program_of(std::initializer_list<Term> terms) {
  SumProgram program;
  for (const Term& term : terms) program.add_term(term.row, term.joins);
  return program;
}

float f32(double value) {
  return static_cast<float>(value);
}

TEST_CASE("tree_sum adds in the order of its program, rounded after every addition") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(0, 1, 63, 64, 65, 700, 2 * cpu::kMinWorkPerThread + 13);
  const HostTensor terms = random_tensor(DType::kF32, {5, n}, 1);
  HostTensor one(dtype, {n}), two(dtype, {n}), chain(dtype, {n});
  // (t3 + (t0 + t4)) + (t1 + t2)
  const SumProgram program = program_of({{3, 0}, {0, 0}, {4, 2}, {1, 0}, {2, 2}});
  tree_sum(kCpu, program, terms, one);
  tree_sum(kTwoThreads, program, terms, two);
  tree_sum(kCpu, program_of({{3, 0}, {0, 1}, {4, 1}, {1, 1}, {2, 1}}), terms, chain);
  HostTensor expected(dtype, {n}), expected_chain(dtype, {n});
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const auto t = [&](size_t row) { return f32(terms[row * static_cast<size_t>(n) + i]); };
    const float left = t(0) + t(4), right = t(1) + t(2);
    expected.set(i, static_cast<double>((t(3) + left) + right));
    expected_chain.set(i, static_cast<double>((((t(3) + t(0)) + t(4)) + t(1)) + t(2)));
  }
  CHECK(one.same_bits(expected));
  CHECK(two.same_bits(expected));
  CHECK(chain.same_bits(expected_chain));
  // The two orders differ, so the comparisons have teeth; bf16 hides it.
  if (n > 500 && dtype == DType::kF32) CHECK(!chain.same_bits(one));
}

TEST_CASE("tree_sum of one term copies it, and out may be a term's row") {
  const HostTensor x = random_tensor(DType::kF32, {3, 700}, 1);
  HostTensor copy(DType::kF32, {700}), rounded(DType::kBF16, {700}), sum(DType::kF32, {700});
  tree_sum(kCpu, program_of({{1, 0}}), x, copy);
  tree_sum(kCpu, program_of({{1, 0}}), x, rounded);
  for (size_t i = 0; i < 700; ++i) {
    REQUIRE(copy[i] == x[700 + i]);
    REQUIRE(rounded[i] == static_cast<double>(static_cast<float>(BF16(f32(x[700 + i])))));
  }
  const SumProgram program = program_of({{0, 0}, {1, 0}, {2, 2}});
  tree_sum(kCpu, program, x, sum);
  for (int64_t row = 0; row < 3; ++row) {
    HostTensor in_place = x;
    const Tensor out = in_place.tensor().rows(row, row + 1).view({700});
    tree_sum(kCpu, program_of({{row, 0}}), in_place, out);
    CHECK(in_place.same_bits(x));
    tree_sum(kCpu, program, in_place, out);
    for (size_t i = 0; i < 700; ++i) REQUIRE(in_place[static_cast<size_t>(row) * 700 + i] == sum[i]);
  }
}

TEST_CASE("tree_sum of rows for each of several, in f32 and bf16, is that of each alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16), out_dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(1, 64, 200);
  constexpr int64_t kOuter = 130, kRows = 5;
  const HostTensor terms = random_tensor(dtype, {kOuter, kRows, n}, 1);
  HostTensor out(out_dtype, {kOuter, n});
  for (const Stream& stream : {kCpu, kTwoThreads}) {
    tree_sum(stream, program_of({{3, 0}, {0, 1}, {4, 0}, {1, 1}, {2, 2}}), terms, out);
    for (int64_t t = 0; t < kOuter; ++t) {
      for (int64_t i = 0; i < n; ++i) {
        const auto term = [&](int64_t row) { return f32(terms[static_cast<size_t>((t * kRows + row) * n + i)]); };
        const float sum = (term(3) + term(0)) + ((term(4) + term(1)) + term(2));
        const float rounded = out_dtype == DType::kF32 ? sum : static_cast<float>(BF16(sum));
        REQUIRE(f32(out[static_cast<size_t>(t * n + i)]) == rounded);
      }
    }
  }
}

TEST_CASE("tree_sum keeps zeros, infinities and subnormal values as IEEE has them") {
  const double inf = std::numeric_limits<double>::infinity();
  const HostTensor terms(DType::kF32, {2, 6},
                         {-0.0, -0.0, 0.0, inf, inf, 0x1p-149,  //
                          -0.0, 0.0, -0.0, -1, -inf, 0x1p-149});
  HostTensor sum(DType::kF32, {6});
  tree_sum(kCpu, program_of({{0, 0}, {1, 1}}), terms, sum);
  CHECK((sum[0] == 0 && std::signbit(sum[0])));
  CHECK((sum[1] == 0 && !std::signbit(sum[1])));
  CHECK((sum[2] == 0 && !std::signbit(sum[2])));
  CHECK(sum[3] == inf);
  CHECK(std::isnan(sum[4]));
  CHECK(sum[5] == 0x1p-148);
}

TEST_CASE("tree_sum on meta, and of wrong programs and operands") {
  const HostTensor terms(DType::kF32, {2, 4}), int_terms(DType::kI32, {2, 4}), out(DType::kF32, {4}),
      shorter(DType::kF32, {3}), ints(DType::kI32, {4});
  const SumProgram sum = program_of({{0, 0}, {1, 1}});
  tree_sum(kMeta, sum, terms.on(DeviceType::kMeta), out.on(DeviceType::kMeta));
  const auto refused = [&](const SumProgram& program, const Tensor& x, const Tensor& y) {
    return message_of(ErrorKind::kFault, [&] { tree_sum(kCpu, program, x, y); });
  };
  CHECK(contains(refused(sum, terms, shorter), "out is f32 (1, 3), expected f32 (1, 4)"));
  CHECK(contains(refused(sum, out, out), "out is f32 (4), expected f32 or bf16 of 2 dims"));
  CHECK(contains(refused(sum, terms, ints), "out is i32 (1, 4), expected f32 or bf16 of 2 dims"));
  CHECK(contains(refused(sum, int_terms, out), "terms is i32 (1, 2, 4), expected f32 or bf16 of 3 dims"));
  CHECK(
      contains(refused(sum, terms, out.tensor().view({2, 2})), "terms is f32 (2, 4), expected f32 or bf16 of 3 dims"));
  CHECK(contains(refused(program_of({{0, 0}, {2, 1}}), terms, out), "term 1 is row 2 of 2"));
  CHECK(contains(refused(program_of({{0, 1}, {1, 0}}), terms, out), "1 joins after term 0"));
  CHECK(contains(refused(program_of({{0, 0}, {1, 0}}), terms, out), "2 values remain of 2 terms"));
  CHECK(contains(refused(SumProgram(), terms, out), "0 values remain of 0 terms"));
  SumProgram deep;
  for (int t = 0; t < SumProgram::kMaxDepth + 1; ++t) deep.add_term(0, 0);
  deep.add_term(0, SumProgram::kMaxDepth - 1);
  deep.add_term(0, 3);
  CHECK(contains(refused(deep, terms, out), "26 values on the stack, at most 24"));
  SumProgram full;
  for (int t = 0; t < SumProgram::kMaxTerms; ++t) full.add_term(0, t == 0 ? 0 : 1);
  tree_sum(kCpu, full, terms, out);
  CHECK(contains(message_of(ErrorKind::kFault, [&] { full.add_term(0, 1); }), "more than 1024 terms"));
}

}  // namespace
}  // namespace invar::ops
