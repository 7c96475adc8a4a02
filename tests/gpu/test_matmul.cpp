#include "device_tensor.h"
#include "ops/matmul.h"

namespace invar::ops {
namespace {

using namespace invar::test;

const Stream kThreads(DeviceType::kCpu, 8);

// A product whose operands lie in buffers with `offset` rows before them and one after c.
struct Product {
  Product(int64_t m_, int64_t n_, int64_t k_, bool ta_, bool tb_, DType in, DType out, int64_t offset_ = 0)
      : m(m_),
        offset(offset_),
        ta(ta_),
        tb(tb_),
        a(random_tensor(in, {offset + (ta ? k_ : m), ta ? m : k_}, 1)),
        b(random_tensor(in, {offset + (tb ? n_ : k_), tb ? k_ : n_}, 2)),
        c(random_tensor(out, {offset + m + 1, n_}, 3)) {}

  void run(const Stream& stream, const Tensor& a_, const Tensor& b_, const Tensor& c_, float beta) const {
    const auto rest = [&](const Tensor& t) { return t.rows(offset, t.dim(0)); };
    matmul(stream, rest(a_), ta ? Transpose::kYes : Transpose::kNo, rest(b_), tb ? Transpose::kYes : Transpose::kNo,
           c_.rows(offset, offset + m), beta);
  }
  HostTensor expected(float beta) const {
    HostTensor out = c;
    run(kThreads, a, b, out, beta);
    return out;
  }
  HostTensor on(const Stream& stream, float beta) const {
    const DeviceTensor device_a(a), device_b(b), device_c(c);
    synchronize(gpu());  // they are copied in its order
    run(stream, device_a, device_b, device_c, beta);
    synchronize(stream);
    return device_c.host();
  }
  // TF32 would be wrong by 3e-4; rounding to bf16 here and there the other way by 3e-4 too.
  void check(float beta) const {
    const HostTensor actual = on(gpu(), beta), wanted = expected(beta);
    const bool bf16 = c.tensor().dtype() == DType::kBF16;
    CHECK(relative_norm(actual.values(), wanted.values()) <= (bf16 ? 1e-3 : 1e-5));
    // Nothing is written but c.
    const auto n = static_cast<size_t>(c.tensor().dim(1));
    const size_t begin = static_cast<size_t>(offset) * n, end = begin + static_cast<size_t>(m) * n;
    for (size_t i = 0; i < c.size(); ++i) {
      if ((i < begin || i >= end) && actual[i] != c[i]) FAIL_CHECK("element " << i << " is overwritten");
    }
    CHECK(on(gpu(), beta).same_bits(actual));
  }

  int64_t m, offset;
  bool ta, tb;
  HostTensor a, b, c;
};

struct Case {
  DType in, out;
  float beta;
};

Case any_case() {
  return GENERATE(values<Case>({{DType::kF32, DType::kF32, 0},
                                {DType::kF32, DType::kF32, 1},
                                {DType::kF32, DType::kBF16, 0},
                                {DType::kBF16, DType::kF32, 0},
                                {DType::kBF16, DType::kF32, 1},
                                {DType::kBF16, DType::kBF16, 0}}));
}

struct Size {
  int64_t m, n, k;
};

TEST_CASE("matmul on the GPU for every transpose, type and odd size") {
  const auto [in, out, beta] = any_case();
  const bool ta = GENERATE(false, true), tb = GENERATE(false, true);
  const auto [m, n, k] = GENERATE(values<Size>({{1, 1, 1},
                                                {3, 5, 7},
                                                {17, 33, 65},
                                                {1, 300, 129},
                                                {300, 1, 129},
                                                {64, 96, 128},
                                                {130, 258, 1026},
                                                {512, 384, 2048}}));
  const int64_t offset = GENERATE(0, 1);  // odd rows before: of any alignment down to one element
  CAPTURE(name_of(in), name_of(out), beta, ta, tb, m, n, k, offset);
  Product(m, n, k, ta, tb, in, out, offset).check(beta);
}

TEST_CASE("matmul on the GPU of large sizes") {
  const auto [in, out, beta] = any_case();
  const auto [ta, tb] = GENERATE(table<bool, bool>({{false, true}, {false, false}, {true, false}}));
  CAPTURE(name_of(in), name_of(out), beta, ta, tb);
  Product(2048, 1024, 4096, ta, tb, in, out).check(beta);
}

TEST_CASE("matmul on the GPU without rows, columns or terms") {
  const auto [in, out, beta] = any_case();
  const bool ta = GENERATE(false, true), tb = GENERATE(false, true);
  const auto [m, n, k] = GENERATE(values<Size>({{0, 5, 7}, {5, 0, 7}, {5, 7, 0}, {0, 0, 0}}));
  CAPTURE(name_of(in), name_of(out), beta, ta, tb, m, n, k);
  const Product product(m, n, k, ta, tb, in, out, 1);
  CHECK(product.on(gpu(), beta).same_bits(product.expected(beta)));
}

TEST_CASE("matmul on the GPU overwrites NaN where beta is 0") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  Product product(64, 48, 32, false, true, dtype, dtype);
  const HostTensor wanted = product.expected(0);
  for (size_t i = 0; i < size_t{64} * 48; ++i) product.c.set(i, std::nan(""));
  CHECK(relative_norm(product.on(gpu(), 0).values(), wanted.values()) <= 1e-3);
}

// The first product of a size measures which algorithm is fastest; a new stream measures anew.
TEST_CASE("matmul on the GPU measures without touching c, and with the same bits whatever it finds") {
  const auto [in, out, beta] = any_case();
  const Product product(2000, 1032, 1024, true, false, in, out);
  const HostTensor first = product.on(make_cuda_stream(0), beta);
  CHECK(relative_norm(first.values(), product.expected(beta).values()) <= (out == DType::kF32 ? 1e-5 : 1e-3));
  for (int i = 0; i < 3; ++i) CHECK(product.on(make_cuda_stream(0), beta).same_bits(first));
}

}  // namespace
}  // namespace invar::ops
