#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/error.h"
#include "ops/cpu/gemm.h"
#include "ops/matmul.h"
#include "ops/proofs.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using ops::Transpose;
using ops::cpu::GemmIsa;
using test::contains;
using test::message_of;

namespace {

const Stream kCpu(DeviceType::kCpu);

constexpr std::array kTransposes = {std::pair{false, false}, std::pair{false, true}, std::pair{true, false},
                                    std::pair{true, true}};

struct Size {
  int64_t m, n, k;
};

template <class T>
using Matrix = std::vector<T>;

template <class T>
Matrix<T> random_matrix(int64_t elements, uint32_t seed) {
  std::mt19937 generator(seed);
  Matrix<T> out(static_cast<size_t>(elements));
  for (T& value : out) value = static_cast<T>(static_cast<float>(generator()) * 0x1p-31f - 1.0f);
  return out;
}

template <class T>
Matrix<T> transposed(const Matrix<T>& matrix, int64_t rows, int64_t cols) {
  Matrix<T> out(matrix.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      out[static_cast<size_t>(j * rows + i)] = matrix[static_cast<size_t>(i * cols + j)];
  }
  return out;
}

uint32_t bits(float value) {
  return std::bit_cast<uint32_t>(value);
}
uint32_t bits(BF16 value) {
  return value.bits;
}

template <class T>
int64_t differing_bits(const Matrix<T>& x, const Matrix<T>& y) {
  REQUIRE(x.size() == y.size());
  int64_t count = 0;
  for (size_t i = 0; i < x.size(); ++i) count += bits(x[i]) != bits(y[i]);
  return count;
}

// What the header promises, element by element.
template <class In, class Out>
Matrix<Out> chains(Size size, const Matrix<In>& a, const Matrix<In>& b, const Matrix<Out>* c = nullptr) {
  Matrix<Out> out(static_cast<size_t>(size.m * size.n));
  for (int64_t i = 0; i < size.m; ++i) {
    for (int64_t j = 0; j < size.n; ++j) {
      float sum = 0.0f;
      for (int64_t k = 0; k < size.k; ++k) {
        sum = std::fma(static_cast<float>(a[static_cast<size_t>(i * size.k + k)]),
                       static_cast<float>(b[static_cast<size_t>(k * size.n + j)]), sum);
      }
      const auto at = static_cast<size_t>(i * size.n + j);
      out[at] = static_cast<Out>(c ? sum + static_cast<float>((*c)[at]) : sum);
    }
  }
  return out;
}

// The product by the CPU back end; a (m, k) and b (k, n) are given untransposed and stored as asked.
template <class Out, class In>
Matrix<Out> product(Size size, const Matrix<In>& a, const Matrix<In>& b, bool ta = false, bool tb = false,
                    const Matrix<Out>* c = nullptr, int threads = 1, GemmIsa isa = ops::cpu::best_gemm_isa()) {
  const Matrix<In> stored_a = ta ? transposed(a, size.m, size.k) : a;
  const Matrix<In> stored_b = tb ? transposed(b, size.k, size.n) : b;
  Matrix<Out> out = c ? *c : Matrix<Out>(static_cast<size_t>(size.m * size.n), static_cast<Out>(NAN));
  ops::cpu::gemm(size.m, size.n, size.k, stored_a.data(), ta ? size.m : size.k, ta, stored_b.data(), tb, out.data(),
                 c != nullptr, threads, isa);
  return out;
}

std::vector<GemmIsa> supported_isas() {
  std::vector<GemmIsa> out;
  for (const GemmIsa isa : {GemmIsa::kPortable, GemmIsa::kAvx2, GemmIsa::kAvx512}) {
    if (ops::cpu::is_supported(isa)) {
      out.push_back(isa);
    } else {
      WARN("not tested, because this processor lacks it: " << ops::cpu::name_of(isa));
    }
  }
  return out;
}

template <class T>
Tensor tensor_of(Matrix<T>& matrix, std::initializer_list<int64_t> shape) {
  return Tensor(matrix.data(), DTypeOf<T>::value, DeviceType::kCpu, shape);
}

}  // namespace

TEMPLATE_TEST_CASE("every element is one chain of fused multiply-adds", "[matmul]", float, BF16) {
  // Register tiles are 4x16, 6x16 and 14x32; blocks are 256 in k, 192 and 768 in rows, 1024 in columns.
  const Size size = GENERATE(values<Size>({{1, 1, 1},
                                           {1, 7, 3},
                                           {3, 1, 2},
                                           {4, 16, 4},
                                           {13, 31, 255},
                                           {14, 32, 256},
                                           {15, 33, 257},
                                           {6, 17, 512},
                                           {29, 65, 771},
                                           {43, 15, 1100},
                                           {197, 34, 259},
                                           {2, 1061, 260},
                                           {783, 5, 261}}));
  const auto a = random_matrix<TestType>(size.m * size.k, 1);
  const auto b = random_matrix<TestType>(size.k * size.n, 2);
  const auto c = random_matrix<float>(size.m * size.n, 3);
  const auto expected = chains<TestType, float>(size, a, b);
  const auto expected_bf16 = chains<TestType, BF16>(size, a, b);
  const auto expected_sum = chains<TestType, float>(size, a, b, &c);
  for (const GemmIsa isa : supported_isas()) {
    for (const auto& [ta, tb] : kTransposes) {
      INFO(size.m << " " << size.n << " " << size.k << " " << ta << tb << " " << ops::cpu::name_of(isa));
      CHECK(differing_bits(product<float>(size, a, b, ta, tb, nullptr, 1, isa), expected) == 0);
      CHECK(differing_bits(product<BF16>(size, a, b, ta, tb, nullptr, 1, isa), expected_bf16) == 0);
      CHECK(differing_bits(product<float>(size, a, b, ta, tb, &c, 1, isa), expected_sum) == 0);
    }
  }
}

TEMPLATE_TEST_CASE("the product is close to the exact one", "[matmul]", float, BF16) {
  const Size size = GENERATE(values<Size>({{5, 9, 33}, {37, 45, 700}}));
  auto a = random_matrix<TestType>(size.m * size.k, 4);
  auto b = random_matrix<TestType>(size.k * size.n, 5);
  const auto& [ta, tb] = GENERATE(from_range(kTransposes.begin(), kTransposes.end()));
  // The number of elements off by more than the error bound of recursive summation, k·u·sum |a||b|, plus the rounding
  // of the result (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
  const auto misses = [&](const auto& c, double result_rounding) {
    int64_t count = 0;
    for (int64_t i = 0; i < size.m; ++i) {
      for (int64_t j = 0; j < size.n; ++j) {
        double exact = 0.0;
        double magnitude = 0.0;
        for (int64_t k = 0; k < size.k; ++k) {
          const double term = static_cast<double>(static_cast<float>(a[static_cast<size_t>(i * size.k + k)])) *
                              static_cast<double>(static_cast<float>(b[static_cast<size_t>(k * size.n + j)]));
          exact += term;
          magnitude += std::abs(term);
        }
        const double bound = static_cast<double>(size.k) * 0x1p-24 * magnitude + result_rounding * std::abs(exact);
        const double value = static_cast<double>(static_cast<float>(c[static_cast<size_t>(i * size.n + j)]));
        count += !(std::abs(value - exact) <= bound);
      }
    }
    return count;
  };
  Matrix<TestType> stored_a = ta ? transposed(a, size.m, size.k) : a;
  Matrix<TestType> stored_b = tb ? transposed(b, size.k, size.n) : b;
  const Tensor a_tensor = ta ? tensor_of(stored_a, {size.k, size.m}) : tensor_of(stored_a, {size.m, size.k});
  const Tensor b_tensor = tb ? tensor_of(stored_b, {size.n, size.k}) : tensor_of(stored_b, {size.k, size.n});
  const Stream stream(DeviceType::kCpu);

  Matrix<float> c(static_cast<size_t>(size.m * size.n), NAN);
  ops::matmul(stream, a_tensor, Transpose{ta}, b_tensor, Transpose{tb}, tensor_of(c, {size.m, size.n}));
  CHECK(misses(c, 0.0) == 0);
  Matrix<BF16> c_bf16(c.size());
  ops::matmul(stream, a_tensor, Transpose{ta}, b_tensor, Transpose{tb}, tensor_of(c_bf16, {size.m, size.n}));
  CHECK(misses(c_bf16, 0x1p-8) == 0);
  CHECK(misses(c_bf16, 0.0) > 0);

  ops::matmul(stream, a_tensor, Transpose{ta}, b_tensor, Transpose{tb}, tensor_of(c, {size.m, size.n}), 1.0f);
  for (float& value : c) value *= 0.5f;
  CHECK(misses(c, 0.0) == 0);

  // The bound is tight enough to see one wrong operand.
  a[0] = static_cast<TestType>(static_cast<float>(a[0]) + 0.25f);
  CHECK(misses(c, 0.0) > 0);
}

TEST_CASE("a part of the product computed alone has the same bits", "[matmul]") {
  const Size size{61, 150, 600};
  const auto a = random_matrix<float>(size.m * size.k, 6);
  const auto b = random_matrix<float>(size.k * size.n, 7);
  const auto whole = product<float>(size, a, b);
  const auto b_transposed = transposed(b, size.k, size.n);
  for (const auto& [row, rows, col, cols] : std::vector<std::array<int64_t, 4>>{
           {0, 1, 0, 1}, {60, 1, 149, 1}, {7, 14, 5, 32}, {13, 30, 31, 70}, {1, 60, 100, 50}, {5, 3, 1, 149}}) {
    Matrix<float> out(static_cast<size_t>(rows * cols));
    ops::cpu::gemm(rows, cols, size.k, a.data() + row * size.k, size.k, false, b_transposed.data() + col * size.k, true,
                   out.data(), false, 1);
    Matrix<float> expected;
    for (int64_t i = row; i < row + rows; ++i) {
      expected.insert(expected.end(), whole.begin() + i * size.n + col, whole.begin() + i * size.n + col + cols);
    }
    CHECK(differing_bits(out, expected) == 0);
  }
}

TEST_CASE("the number of threads does not change a bit", "[matmul]") {
  // Every thread gets a share; tall, wide and square choose different grids. The last one keeps threads busy long
  // enough to meet in each other's buffers, if they had any in common.
  const Size size = GENERATE(values<Size>({{901, 19, 310}, {17, 1103, 300}, {203, 222, 300}, {810, 830, 550}}));
  const auto a = random_matrix<BF16>(size.m * size.k, 8);
  const auto b = random_matrix<BF16>(size.k * size.n, 9);
  const auto c = random_matrix<float>(size.m * size.n, 10);
  const auto expected = product<float>(size, a, b, false, true);
  const auto expected_sum = product<float>(size, a, b, true, false, &c);
  for (const int threads : {2, 3, 4, 7, 16}) {
    CHECK(differing_bits(product<float, BF16>(size, a, b, false, true, nullptr, threads), expected) == 0);
    CHECK(differing_bits(product<float>(size, a, b, true, false, &c, threads), expected_sum) == 0);
  }
}

TEST_CASE("a sum cut in two along k has other bits", "[matmul]") {
  const Size size{20, 40, 600};
  const auto a = random_matrix<float>(size.m * size.k, 11);
  const auto b = random_matrix<float>(size.k * size.n, 12);
  const auto a_transposed = transposed(a, size.m, size.k);
  const auto whole = product<float>(size, a, b);
  Matrix<float> halves(whole.size());
  const int64_t half = size.k / 2;
  ops::cpu::gemm(size.m, size.n, half, a_transposed.data(), size.m, true, b.data(), false, halves.data(), false, 1);
  ops::cpu::gemm(size.m, size.n, size.k - half, a_transposed.data() + half * size.m, size.m, true,
                 b.data() + half * size.n, false, halves.data(), true, 1);
  CHECK(differing_bits(halves, whole) > size.m * size.n / 4);
}

TEMPLATE_TEST_CASE("columns of a matrix multiply as a copy of them", "[matmul]", float, BF16) {
  struct Part {
    int64_t m, n, stored;
    Range columns;
  };
  const Part part = GENERATE(values<Part>({{1, 1, 3, {1, 2}},
                                           {5, 7, 9, {0, 9}},
                                           {13, 31, 33, {3, 30}},
                                           {29, 33, 700, {259, 700}},
                                           {61, 65, 1100, {0, 515}},
                                           {203, 222, 900, {301, 602}},
                                           {3, 4, 5, {2, 2}}}));
  const Size size{part.m, part.n, part.columns.size()};
  auto a = random_matrix<TestType>(part.m * part.stored, 31);
  auto b = random_matrix<TestType>(size.k * size.n, 32);
  const auto sum = random_matrix<float>(size.m * size.n, 33);
  Matrix<TestType> copied;
  for (int64_t i = 0; i < part.m; ++i) {
    const auto row = a.begin() + i * part.stored;
    copied.insert(copied.end(), row + part.columns.begin, row + part.columns.end);
  }
  for (const int threads : {1, 2}) {
    CAPTURE(part.m, part.n, part.stored, part.columns.begin, part.columns.end, threads);
    const Stream stream(DeviceType::kCpu, threads);
    const auto differing = [&](auto c, float beta) {
      auto expected = c;
      const Tensor stored = tensor_of(a, {part.m, part.stored}), right = tensor_of(b, {size.k, size.n});
      ops::matmul_columns(stream, stored, part.columns, Transpose::kNo, right, tensor_of(c, {size.m, size.n}), beta);
      ops::matmul(stream, tensor_of(copied, {size.m, size.k}), Transpose::kNo, right, Transpose::kNo,
                  tensor_of(expected, {size.m, size.n}), beta);
      return differing_bits(c, expected);
    };
    CHECK(differing(Matrix<float>(sum.size(), NAN), 0.0f) == 0);
    CHECK(differing(Matrix<BF16>(sum.size(), static_cast<BF16>(NAN)), 0.0f) == 0);
    CHECK(differing(sum, 1.0f) == 0);

    auto right = random_matrix<TestType>(part.m * part.n, 34);
    auto rows = random_matrix<float>(size.k * size.n, 35), expected = rows;
    const Tensor terms = tensor_of(right, {part.m, part.n});
    ops::matmul_columns(stream, tensor_of(a, {part.m, part.stored}), part.columns, Transpose::kYes, terms,
                        tensor_of(rows, {size.k, size.n}), 1.0f);
    ops::matmul(stream, tensor_of(copied, {size.m, size.k}), Transpose::kYes, terms, Transpose::kNo,
                tensor_of(expected, {size.k, size.n}), 1.0f);
    CHECK(differing_bits(rows, expected) == 0);
  }
}

TEST_CASE("ranks of one process multiply at the same time", "[matmul]") {
  constexpr int kRanks = 3;
  std::array<int64_t, kRanks> wrong{};
  std::array<Size, kRanks> sizes = {Size{450, 290, 300}, {264, 300, 470}, {131, 600, 513}};
  std::barrier start(kRanks);  // so that they do meet
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&wrong, &start, size = sizes[rank], rank] {
      auto a = random_matrix<float>(size.m * size.k, 13 + static_cast<uint32_t>(rank));
      auto b = random_matrix<float>(size.k * size.n, 17);
      const auto expected = product<float>(size, a, b);
      for (int round = 0; round < 30; ++round) {
        Matrix<float> c(expected.size());
        start.arrive_and_wait();
        ops::matmul(Stream(DeviceType::kCpu, 2), tensor_of(a, {size.m, size.k}), Transpose::kNo,
                    tensor_of(b, {size.k, size.n}), Transpose::kNo, tensor_of(c, {size.m, size.n}));
        for (size_t i = 0; i < c.size(); ++i) wrong[rank] += bits(c[i]) != bits(expected[i]);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(wrong == std::array<int64_t, kRanks>{});
}

TEST_CASE("empty sizes", "[matmul]") {
  const Stream stream(DeviceType::kCpu, 2);
  Matrix<float> none;
  Matrix<float> c(6, NAN);
  // A sum of no terms is zero, whatever c held; added to c it leaves c alone.
  ops::matmul(stream, tensor_of(none, {2, 0}), Transpose::kNo, tensor_of(none, {0, 3}), Transpose::kNo,
              tensor_of(c, {2, 3}));
  CHECK(c == Matrix<float>(6, 0.0f));
  c.assign(6, 7.0f);
  ops::matmul(stream, tensor_of(none, {2, 0}), Transpose::kNo, tensor_of(none, {0, 3}), Transpose::kNo,
              tensor_of(c, {2, 3}), 1.0f);
  CHECK(c == Matrix<float>(6, 7.0f));
  Matrix<float> b(12, 1.0f);
  CHECK_NOTHROW(ops::matmul(stream, tensor_of(none, {0, 4}), Transpose::kNo, tensor_of(b, {4, 3}), Transpose::kNo,
                            tensor_of(none, {0, 3})));
  CHECK_NOTHROW(ops::matmul(stream, tensor_of(b, {3, 4}), Transpose::kNo, tensor_of(none, {4, 0}), Transpose::kNo,
                            tensor_of(none, {3, 0})));
}

TEST_CASE("NaN and infinity stay in their row and column", "[matmul]") {
  const Size size{17, 35, 270};
  auto a = random_matrix<float>(size.m * size.k, 21);
  auto b = random_matrix<float>(size.k * size.n, 22);
  const auto clean = product<float>(size, a, b);
  a[static_cast<size_t>(16 * size.k + 269)] = std::numeric_limits<float>::infinity();
  b[static_cast<size_t>(3 * size.n + 34)] = std::numeric_limits<float>::quiet_NaN();
  for (const GemmIsa isa : supported_isas()) {
    const auto dirty = product<float>(size, a, b, false, false, nullptr, 1, isa);
    int64_t wrong = 0;
    for (int64_t i = 0; i < size.m; ++i) {
      for (int64_t j = 0; j < size.n; ++j) {
        const auto at = static_cast<size_t>(i * size.n + j);
        const bool right =
            j == 34 ? std::isnan(dirty[at]) : (i == 16 ? std::isinf(dirty[at]) : bits(dirty[at]) == bits(clean[at]));
        wrong += !right;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("matmul refuses what it cannot multiply", "[matmul]") {
  const auto meta = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor(nullptr, dtype, DeviceType::kMeta, shape);
  };
  const Stream stream(DeviceType::kMeta);
  // Whether the product is refused with a message that says `words`.
  const auto refuses = [&](const std::string& words, const Tensor& a, Transpose ta, const Tensor& b, Transpose tb,
                           const Tensor& c, float beta = 0.0f) {
    const std::string message = message_of(ErrorKind::kFault, [&] { ops::matmul(stream, a, ta, b, tb, c, beta); });
    INFO(message);
    return !message.empty() && contains(message, words);
  };
  constexpr auto kNo = Transpose::kNo;
  constexpr auto kYes = Transpose::kYes;
  const DType f32 = DType::kF32;
  const DType bf16 = DType::kBF16;
  const Tensor a = meta(f32, {2, 3});
  const Tensor b = meta(f32, {3, 5});
  const Tensor c = meta(f32, {2, 5});

  CHECK_NOTHROW(ops::matmul(stream, a, kNo, b, kNo, c));
  CHECK_NOTHROW(ops::matmul(stream, a, kNo, b, kNo, c, 1.0f));
  CHECK_NOTHROW(ops::matmul(stream, meta(bf16, {3, 2}), kYes, meta(bf16, {5, 3}), kYes, meta(bf16, {2, 5})));

  CHECK(refuses("do not fit: a is f32 (2, 3) transposed, b is f32 (3, 5), c is f32 (2, 5)", a, kYes, b, kNo, c));
  CHECK(refuses("do not fit", a, kNo, b, kYes, c));
  CHECK(refuses("do not fit", a, kNo, b, kNo, meta(f32, {5, 2})));
  CHECK(refuses("do not fit", a, kNo, b, kNo, meta(f32, {2, 4})));
  CHECK(refuses("do not fit", a, kNo, meta(f32, {4, 5}), kNo, c));
  CHECK(refuses("a is f32, but b is bf16", a, kNo, meta(bf16, {3, 5}), kNo, c));
  CHECK(refuses("a is f64 (2, 3), expected f32 or bf16", meta(DType::kF64, {2, 3}), kNo, meta(DType::kF64, {3, 5}), kNo,
                c));
  CHECK(refuses("c is i32 (2, 5), expected f32 or bf16", a, kNo, b, kNo, meta(DType::kI32, {2, 5})));
  CHECK(refuses("a is f32 (1, 2, 3), expected f32 or bf16 of 2 dims", meta(f32, {1, 2, 3}), kNo, b, kNo, c));
  CHECK(refuses("c is f32 (10), expected f32 or bf16 of 2 dims", a, kNo, b, kNo, meta(f32, {10})));
  CHECK(refuses("of 2 dims", Tensor{}, kNo, b, kNo, c));
  CHECK(refuses("beta is 0.5 and c f32", a, kNo, b, kNo, c, 0.5f));
  CHECK(refuses("beta is 1 and c bf16", a, kNo, b, kNo, meta(bf16, {2, 5}), 1.0f));

  const auto columns = [&](Range range, const Tensor& right, const Tensor& out, float beta = 0.0f) {
    return message_of(ErrorKind::kFault, [&] { ops::matmul_columns(stream, a, range, kNo, right, out, beta); });
  };
  const Tensor b2 = meta(f32, {2, 5});
  CHECK(columns({1, 3}, b2, c) == "");
  CHECK(contains(columns({2, 4}, b2, c), "matmul_columns: columns 2 to 4 of a f32 (2, 3)"));
  CHECK(contains(columns({-1, 1}, b2, c), "columns -1 to 1"));
  CHECK(contains(columns({3, 1}, b2, c), "columns 3 to 1"));
  CHECK(
      contains(columns({0, 2}, b, c), "matmul_columns: shapes do not fit: a is f32 (2, 3), columns 0 to 2, b is f32"));
  CHECK(contains(columns({0, 2}, meta(bf16, {2, 5}), c), "a is f32, but b is bf16"));
  CHECK(contains(columns({0, 2}, b2, meta(bf16, {2, 5}), 1.0f), "beta is 1 and c bf16"));

  Matrix<float> bytes(10);
  CHECK(refuses("on cpu, but the stream is on meta", a, kNo, b, kNo, tensor_of(bytes, {2, 5})));
  const Tensor on_gpu(bytes.data(), f32, DeviceType::kCuda, {2, 2});
  CHECK(contains(
      message_of(ErrorKind::kFault, [&] { ops::matmul(Stream(DeviceType::kCuda), on_gpu, kNo, on_gpu, kNo, on_gpu); }),
      "built without CUDA"));
}

TEST_CASE("matmul_samples is a product of each sample") {
  const auto [m, n, tokens] = GENERATE(values<Size>({{1, 1, 1}, {7, 5, 3}, {33, 40, 129}, {3, 2, 0}}));
  for (const int64_t samples : {1, 3}) {
    const Range columns{2, 2 + m};
    const int64_t stride = m + 3;
    auto a = random_matrix<BF16>(samples * tokens * stride, 1), b = random_matrix<BF16>(samples * tokens * n, 2);
    Matrix<float> terms(static_cast<size_t>(samples * m * n), 7.0f), expected = terms;
    const Tensor all_a = view_of(a).view({samples * tokens, stride}), all_b = view_of(b).view({samples * tokens, n});
    ops::matmul_samples(kCpu, all_a, columns, all_b, view_of(terms).view({samples, m, n}));
    for (int64_t s = 0; s < samples; ++s) {
      const Tensor term = view_of(expected).view({samples, m * n}).rows(s, s + 1).view({m, n});
      ops::matmul_columns(kCpu, all_a.rows(s * tokens, (s + 1) * tokens), columns, Transpose::kYes,
                          all_b.rows(s * tokens, (s + 1) * tokens), term);
    }
    CHECK(terms == expected);
  }
}

TEST_CASE("matmul_samples of wrong operands, and on meta") {
  Matrix<float> a(4 * 5), b(4 * 3), terms(2 * 5 * 3);
  const Tensor left = view_of(a).view({4, 5}), right = view_of(b).view({4, 3});
  const auto refused = [&](const Tensor& x, Range columns, const Tensor& y, const Tensor& to) {
    return message_of(ErrorKind::kFault, [&] { ops::matmul_samples(kCpu, x, columns, y, to); });
  };
  CHECK(contains(refused(left, {1, 6}, right, view_of(terms).view({2, 5, 3})), "columns 1 to 6 of a f32 (4, 5)"));
  CHECK(contains(refused(left, {0, 5}, right.rows(0, 3), view_of(terms).view({2, 5, 3})),
                 "b is f32 (3, 3), expected f32 (4, 3)"));
  CHECK(contains(refused(left, {0, 5}, right, view_of(terms).rows(0, 15).view({5, 3})),
                 "terms is f32 (5, 3), expected a matrix for each of the samples of 4 tokens"));
  CHECK(contains(refused(left.rows(0, 3), {0, 5}, right.rows(0, 3), view_of(terms).view({2, 5, 3})),
                 "expected a matrix for each of the samples of 3 tokens"));
  CHECK(contains(refused(left, {1, 5}, right, view_of(terms).view({2, 5, 3})),
                 "terms is f32 (2, 5, 3), expected f32 (2, 4, 3)"));

  const auto on_meta = [](const Tensor& x) { return Tensor(nullptr, x.dtype(), DeviceType::kMeta, x.shape()); };
  const Stream stream = Stream::meta(DeviceType::kCuda);
  auto rounded = random_matrix<BF16>(4 * 5, 1);
  const Tensor square = on_meta(view_of(rounded).view({4, 5}));
  const Tensor of_samples(nullptr, DType::kF32, DeviceType::kMeta, {2, 5, 5});
  int64_t proof = 0;
  ops::matmul_samples(stream, square, {0, 5}, square, of_samples, {false, &proof});
  CHECK(proof == 0);
  ops::matmul_samples(stream, square, {0, 5}, square, of_samples, {true, &proof});
  CHECK(proof == ops::product_proof_bytes(2 * 20, 2 * 20, 0));  // of all samples at once
}
