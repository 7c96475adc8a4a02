#include <array>
#include <bit>
#include <cmath>
#include <optional>

#include "app/selftest.h"
#include "app/tensor_core_step.h"
#include "ops/matmul.h"
#include "ops/proofs.h"

namespace invar::app {
namespace {

using ops::Transpose;

enum class Kind : uint8_t { kEven, kMixed, kWide, kCancelling, kSubnormal };
constexpr std::array kKinds = {std::pair{Kind::kEven, "like exponents"}, std::pair{Kind::kMixed, "mixed exponents"},
                               std::pair{Kind::kWide, "wide exponents"},
                               std::pair{Kind::kCancelling, "cancelling terms"},
                               std::pair{Kind::kSubnormal, "subnormal products"}};

struct Sizes {
  int64_t m, n, k;
};

struct Factors {
  Matrix a, b;
};

Factors make_factors(Kind kind, const Sizes& sizes, DType dtype) {
  int spread = 8;
  if (kind == Kind::kEven) spread = 0;
  if (kind == Kind::kWide) spread = 40;
  const int exponent = kind == Kind::kSubnormal ? -66 : 0;
  Factors factors{Matrix(sizes.m, sizes.k, 1, spread, exponent), Matrix(sizes.k, sizes.n, 2, spread, exponent)};
  if (kind == Kind::kCancelling) {  // all but what was rounded away
    for (int64_t k = 0; k < sizes.k / 2; ++k) {
      const int64_t opposite = sizes.k - 1 - k;
      for (int64_t row = 0; row < sizes.m; ++row) factors.a.at(row, opposite) = -factors.a.at(row, k);
      for (int64_t col = 0; col < sizes.n; ++col) factors.b.at(opposite, col) = factors.b.at(k, col);
    }
  }
  return {factors.a.rounded(dtype), factors.b.rounded(dtype)};
}

// How a product is stored, and of what.
struct Form {
  DType in = DType::kF32;
  DType out = DType::kF32;
  bool transpose_a = false;
  bool transpose_b = false;

  std::string describe() const {
    return format("{}{} x {}{} -> {}", name_of(in), transpose_a ? " transposed" : "", name_of(in),
                  transpose_b ? " transposed" : "", name_of(out));
  }
};

// a · b, plus c if there is one, by ops::matmul.
Bits multiply(const Stream& stream, const Form& form, const Matrix& a, const Matrix& b, const Matrix* c = nullptr) {
  Bench bench(stream);
  const Tensor left = bench.matrix(form.in, form.transpose_a ? a.transposed() : a);
  const Tensor right = bench.matrix(form.in, form.transpose_b ? b.transposed() : b);
  const Tensor out = c != nullptr ? bench.matrix(form.out, *c) : bench.unwritten(form.out, {a.rows, b.cols});
  ops::matmul(stream, left, Transpose{form.transpose_a}, right, Transpose{form.transpose_b}, out,
              c != nullptr ? 1.0f : 0.0f, {true});
  return bench.bits(out);
}

// The same as chains of fused multiply-adds.
Matrix chains(const Matrix& a, const Matrix& b, const Matrix* c) {
  Matrix out(a.rows, b.cols);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t col = 0; col < b.cols; ++col) {
      float sum = 0;
      for (int64_t k = 0; k < a.cols; ++k) sum = std::fma(a.at(row, k), b.at(k, col), sum);
      out.at(row, col) = c != nullptr ? c->at(row, col) + sum : sum;
    }
  }
  return out;
}

std::string against_chains(const Stream& stream, DType in, DType dtype_out, bool accumulate) {
  constexpr std::array kSizes = {Sizes{1, 1, 1}, Sizes{3, 5, 7}, Sizes{17, 33, 129}, Sizes{70, 9, 1000}};
  for (const auto& [kind, words] : kKinds) {
    for (const Sizes& sizes : kSizes) {
      const Factors factors = make_factors(kind, sizes, in);
      const Matrix before(sizes.m, sizes.n, 3, 8);
      const Matrix* const c = accumulate ? &before : nullptr;
      const Bits expected = chains(factors.a, factors.b, c).bits(dtype_out);
      for (const auto& [ta, tb] : {std::pair{false, true}, {false, false}, {true, false}}) {
        const Form form{in, dtype_out, ta, tb};
        const std::string found = difference(multiply(stream, form, factors.a, factors.b, c), expected);
        if (!found.empty()) {
          return format("{}, {}, K = {}: {}", form.describe(), words, sizes.k, found);
        }
      }
    }
  }
  return "";
}

// The bits of a product whose rows or columns are computed in two parts.
Bits in_two(const Stream& stream, const Form& form, const Factors& factors, bool rows, int64_t cut) {
  const auto& [a, b] = factors;
  const int64_t end = rows ? a.rows : b.cols;
  Bits all(static_cast<size_t>(a.rows * b.cols));
  for (const Range& part : {Range{0, cut}, Range{cut, end}}) {
    const Range of_rows = rows ? part : Range{0, a.rows};
    const Range of_cols = rows ? Range{0, b.cols} : part;
    const Bits bits = multiply(stream, form, a.part(of_rows, {0, a.cols}), b.part({0, b.rows}, of_cols));
    for (int64_t row = 0; row < of_rows.size(); ++row) {
      for (int64_t col = 0; col < of_cols.size(); ++col) {
        all[static_cast<size_t>((of_rows.begin + row) * b.cols + of_cols.begin + col)] =
            bits[static_cast<size_t>(row * of_cols.size() + col)];
      }
    }
  }
  return all;
}

std::string parts_against_whole(const Stream& stream, DType in, bool rows) {
  const Sizes sizes{136, 264, 1040};
  const Factors factors = make_factors(Kind::kCancelling, sizes, in);
  for (const auto& [ta, tb] : {std::pair{false, true}, {false, false}, {true, false}}) {
    const Form form{in, DType::kF32, ta, tb};
    const Bits whole = multiply(stream, form, factors.a, factors.b);
    for (const int64_t cut : {8, 64}) {
      const std::string found = difference(in_two(stream, form, factors, rows, cut), whole);
      if (!found.empty()) return format("{}, cut at {}: {}", form.describe(), cut, found);
    }
  }
  return "";
}

std::string threads_against_one() {
  const Factors factors = make_factors(Kind::kCancelling, {67, 131, 517}, DType::kF32);
  const Form form{DType::kF32, DType::kF32, false, true};
  const Bits expected = multiply(Stream(DeviceType::kCpu, 1), form, factors.a, factors.b);
  for (const int threads : {2, 3, 5}) {
    const std::string found =
        difference(multiply(Stream(DeviceType::kCpu, threads), form, factors.a, factors.b), expected);
    if (!found.empty()) return format("{} threads: {}", threads, found);
  }
  return "";
}

// K in two parts is another sum, and must show: a test that could not tell would prove nothing.
std::string k_in_two(const Stream& stream, DType in) {
  const Sizes sizes{40, 72, 1024};
  const Factors factors = make_factors(Kind::kMixed, sizes, in);
  const Form form{in, DType::kF32, false, true};
  const auto part = [&](Range k, const Matrix* c) {
    return multiply(stream, form, factors.a.part({0, sizes.m}, k), factors.b.part(k, {0, sizes.n}), c);
  };
  const Bits first = part({0, 512}, nullptr);
  Matrix sum(sizes.m, sizes.n);
  for (size_t i = 0; i < first.size(); ++i) sum.values[i] = std::bit_cast<float>(first[i]);
  const bool shows = part({512, 1024}, &sum) != multiply(stream, form, factors.a, factors.b);
  return shows ? "" : "the same bits as in one";
}

// F of the tensor cores' k16 step; none if neither fits.
std::optional<int> step_fraction(const Stream& stream) {
  constexpr int64_t kCases = 128, kStep = 16;
  Factors factors{Matrix(kCases, 2 * kStep, 5, 7), Matrix(2 * kStep, kCases, 6, 7)};
  for (int64_t i = 0; i < kCases; ++i) {  // the first step makes the sum that the second one begins with
    for (int64_t k = 2 + i % 3; k < kStep; ++k) factors.a.at(i, k) = 0.0f;
    for (int64_t k = 0; k < kStep / 2 && i % 2 == 1; ++k) {
      factors.a.at(i, 2 * kStep - 1 - k) = -factors.a.at(i, kStep + k);
      factors.b.at(2 * kStep - 1 - k, i) = factors.b.at(kStep + k, i);
    }
  }
  factors = {factors.a.rounded(DType::kBF16), factors.b.rounded(DType::kBF16)};
  const Bits actual = multiply(stream, {DType::kBF16, DType::kF32, false, false}, factors.a, factors.b);
  const Matrix columns = factors.b.transposed();
  for (const int fraction : {24, 25}) {
    Matrix expected(kCases, kCases);
    for (int64_t row = 0; row < kCases; ++row) {
      for (int64_t col = 0; col < kCases; ++col) {
        for (const int64_t k : {int64_t{0}, kStep}) {
          float& sum = expected.at(row, col);
          sum = tensor_core_step(sum, {&factors.a.values[static_cast<size_t>(row * 2 * kStep + k)], kStep},
                                 {&columns.values[static_cast<size_t>(col * 2 * kStep + k)], kStep}, fraction);
        }
      }
    }
    if (difference(actual, expected.bits(DType::kF32)).empty()) return fraction;
  }
  return std::nullopt;
}

}  // namespace

void check_products(SelftestReport& report, const Stream& stream) {
  const bool on_gpu = stream.device() == DeviceType::kCuda;
  for (const DType in : {DType::kF32, DType::kBF16}) {
    const std::string name = format("products of {}", name_of(in));
    if (in == DType::kF32 || !on_gpu) {
      report.check(name + " are chains of fused multiply-adds", [&] {
        std::string found = against_chains(stream, in, DType::kF32, false);
        return found.empty() ? against_chains(stream, in, DType::kBF16, false) : found;
      });
      report.check(name + " added to a sum are one more addition",
                   [&] { return against_chains(stream, in, DType::kF32, true); });
    }
    report.check(name + ", rows in two", [&] { return parts_against_whole(stream, in, true); });
    report.check(name + ", columns in two", [&] { return parts_against_whole(stream, in, false); });
    report.check(name + ", control: K in two differs", [&] { return k_in_two(stream, in); });
  }
  if (!on_gpu) return report.check("products on other numbers of threads", threads_against_one);
  const ops::Proofs proofs = ops::proofs(stream);
  report.tell("products of bf16 proved to be chains of k16 steps", format("{}", proofs.products));
  report.tell("products of bf16 left to the own kernel, which is slow", format("{}", proofs.slow_products.size()));
  const std::optional<int> fraction = step_fraction(stream);
  report.tell("a k16 step cuts terms off below 2^(emax - F)",
              fraction ? format("F = {}", *fraction) : "neither F = 24 nor 25");
}

}  // namespace invar::app
