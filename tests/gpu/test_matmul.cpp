#include <cstring>

#include "device_tensor.h"
#include "ops/cuda/matmul_chain.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/proofs.h"

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

  void run(const Stream& stream, const Tensor& a_, const Tensor& b_, const Tensor& c_, float beta,
           const Numerics& numerics = {}) const {
    const auto rest = [&](const Tensor& t) { return t.rows(offset, t.dim(0)); };
    matmul(stream, rest(a_), ta ? Transpose::kYes : Transpose::kNo, rest(b_), tb ? Transpose::kYes : Transpose::kNo,
           c_.rows(offset, offset + m), beta, numerics);
  }
  HostTensor expected(float beta) const {
    HostTensor out = c;
    run(kThreads, a, b, out, beta);
    return out;
  }
  HostTensor on(const Stream& stream, float beta, const Numerics& numerics = {}) const {
    const DeviceTensor device_a(a), device_b(b), device_c(c);
    synchronize(gpu());  // they are copied in its order
    run(stream, device_a, device_b, device_c, beta, numerics);
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

TEST_CASE("matmul_columns on the GPU is matmul of a copy") {
  const auto [in, out, beta] = any_case();
  struct Part {
    int64_t m, n, stored;
    Range columns;
  };
  const auto [m, n, stored, columns] = GENERATE(values<Part>({{3, 5, 17, {7, 16}},
                                                              {130, 258, 1027, {1, 514}},
                                                              {512, 384, 2048, {512, 1536}},
                                                              {2048, 1024, 4096, {2048, 4096}},
                                                              {5, 7, 9, {4, 4}}}));
  const bool transposed = GENERATE(false, true);  // then m are the terms
  CAPTURE(name_of(in), name_of(out), beta, m, n, stored, columns.begin, columns.end, transposed);
  const HostTensor a = random_tensor(in, {m, stored}, 1),
                   b = random_tensor(in, {transposed ? m : columns.size(), n}, 2);
  HostTensor copied(in, {m, columns.size()});
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < columns.size(); ++k) {
      copied.set(static_cast<size_t>(i * columns.size() + k), a[static_cast<size_t>(i * stored + columns.begin + k)]);
    }
  }
  const HostTensor c = random_tensor(out, {transposed ? columns.size() : m, n}, 3);
  const DeviceTensor device_a(a), device_copied(copied), device_b(b), device_c(c), wanted(c);
  const Transpose transpose{transposed};
  matmul_columns(gpu(), device_a, columns, transpose, device_b, device_c, beta);
  matmul(gpu(), device_copied, transpose, device_b, Transpose::kNo, wanted, beta);
  // A row stride may change the algorithm, and with it the order.
  CHECK(relative_norm(device_c.host().values(), wanted.host().values()) <= (out == DType::kBF16 ? 1e-3 : 1e-5));
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

constexpr Numerics kInvariant{true};

HostTensor columns_of(const HostTensor& x, Range columns) {
  const int64_t rows = x.tensor().dim(0), stride = x.tensor().dim(1);
  HostTensor out(x.tensor().dtype(), {rows, columns.size()});
  const int64_t bytes = size_of(x.tensor().dtype());
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<std::byte*>(out.tensor().raw()) + i * columns.size() * bytes,
                static_cast<const std::byte*>(x.tensor().raw()) + (i * stride + columns.begin) * bytes,
                static_cast<size_t>(columns.size() * bytes));
  }
  return out;
}

int64_t differing(const HostTensor& x, const HostTensor& y) {
  int64_t count = 0;
  for (size_t i = 0; i < x.size(); ++i) count += x[i] != y[i];
  return count;
}

TEST_CASE("bf16 products in invariant numerics have the same bits however the rows are cut") {
  const auto [m, n, k] = GENERATE(values<Size>({{4096, 1024, 3072}, {512, 4096, 1024}, {128, 256, 3072}}));
  const auto [ta, tb] = GENERATE(table<bool, bool>({{false, false}, {false, true}, {true, false}}));
  const HostTensor a = random_tensor(DType::kBF16, {ta ? k : m, ta ? m : k}, 1);
  const HostTensor b = random_tensor(DType::kBF16, {tb ? n : k, tb ? k : n}, 2);
  const int64_t third = m / 3 / 8 * 8;
  const DeviceTensor device_b(b), whole_a(a),
      part_a(ta ? columns_of(a, {0, third}) : HostTensor(DType::kBF16, {third, k}));
  if (!ta) copy_across(gpu(), whole_a.tensor().rows(0, third), part_a);
  const Stream stream = make_cuda_stream(0);
  for (const auto& [out, beta] : {std::pair{DType::kF32, 0.0f}, {DType::kF32, 1.0f}, {DType::kBF16, 0.0f}}) {
    CAPTURE(m, n, k, ta, tb, name_of(out), beta);
    const HostTensor c = random_tensor(out, {m, n}, 3);
    const DeviceTensor whole(c), part(c);
    synchronize(gpu());
    const auto multiply = [&](const Tensor& left, const Tensor& to) {
      matmul(stream, left, Transpose{ta}, device_b, Transpose{tb}, to, beta, kInvariant);
    };
    const int64_t before = proofs(stream).products;
    multiply(whole_a, whole);
    multiply(part_a, part.tensor().rows(0, third));
    synchronize(stream);
    CHECK(proofs(stream).products == before + 2);
    const HostTensor expected = whole.host(), actual = part.host();
    CHECK(std::memcmp(expected.tensor().raw(), actual.tensor().raw(), static_cast<size_t>(third * n * size_of(out))) ==
          0);
    CHECK(relative_norm(expected.values(), c.values()) > 0.5);  // something was multiplied
    if (beta == 0.0f) {                                         // the second time no proof is needed
      multiply(whole_a, whole);
      synchronize(stream);
      CHECK(proofs(stream).products == before + 2);
      CHECK(whole.host().same_bits(expected));
    }
  }
}

TEST_CASE(
    "a product of bf16 in invariant numerics is proved or counted as slow, once, in the memory that was planned") {
  const auto [m, n, k] = GENERATE(values<Size>({{3, 5, 7}, {17, 33, 65}, {1000, 512, 264}}));
  for (const auto& [out, accumulate] : {std::pair{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}}) {
    CAPTURE(m, n, k, name_of(out), accumulate);
    const HostTensor c = random_tensor(out, {m, n}, 3);
    const DeviceTensor a(random_tensor(DType::kBF16, {m, k}, 1)), b(random_tensor(DType::kBF16, {k, n}, 2));
    const DeviceTensor actual(c), own(c);
    synchronize(gpu());
    const Stream stream = make_cuda_stream(0);
    const auto multiply = [&] {
      matmul(stream, a, Transpose::kNo, b, Transpose::kNo, actual, accumulate ? 1.0f : 0.0f, kInvariant);
    };
    multiply();
    cuda::multiply_bf16_in_order(stream.cuda(), {a, {0, k}, false, b, false, own, accumulate});
    synchronize(stream);
    CHECK(actual.host().same_bits(own.host()));
    const Proofs first = proofs(stream);
    CHECK(first.products + std::ssize(first.slow_products) == 1);
    if (m == 1000) CHECK(first.products == 1);
    for (const std::string& slow : first.slow_products) CHECK(contains(slow, format("bf16 ({}, {}) x", m, k)));
    const int64_t planned =
        product_proof_bytes(a.tensor().bytes(), b.tensor().bytes(), accumulate ? c.tensor().bytes() : 0);
    CHECK((first.most_bytes == planned || (first.most_bytes == 0 && first.products == 0)));
    CHECK((first.seconds > 0) == (first.most_bytes > 0));
    multiply();
    const Proofs second = proofs(stream);
    CHECK(second.products == first.products);
    CHECK(second.slow_products == first.slow_products);
    CHECK(second.seconds == first.seconds);
  }
}

TEST_CASE("columns in invariant numerics have the bits of a copy, and two leaves have others than one") {
  const DType in = GENERATE(DType::kF32, DType::kBF16);
  const int64_t m = 512, n = 384, k = 3072, half = k / 2;
  const HostTensor a = random_tensor(in, {m, k}, 1), b = random_tensor(in, {k, n}, 2);
  const DeviceTensor device_a(a), device_b(b), left(columns_of(a, {0, half})), right(columns_of(a, {half, k}));
  const HostTensor none(DType::kF32, {m, n});
  const DeviceTensor leaves(none), copied(none), whole(none);
  synchronize(gpu());
  const Stream stream = make_cuda_stream(0);
  const Tensor upper = device_b.tensor().rows(0, half), lower = device_b.tensor().rows(half, k);
  matmul_columns(stream, device_a, {0, half}, Transpose::kNo, upper, leaves, 0.0f, kInvariant);
  matmul(stream, left, Transpose::kNo, upper, Transpose::kNo, copied, 0.0f, kInvariant);
  synchronize(stream);
  CHECK(leaves.host().same_bits(copied.host()));
  matmul_columns(stream, device_a, {half, k}, Transpose::kNo, lower, leaves, 1.0f, kInvariant);
  matmul(stream, right, Transpose::kNo, lower, Transpose::kNo, copied, 1.0f, kInvariant);
  matmul(stream, device_a, Transpose::kNo, device_b, Transpose::kNo, whole, 0.0f, kInvariant);
  synchronize(stream);
  CHECK(leaves.host().same_bits(copied.host()));
  CHECK(relative_norm(leaves.host().values(), whole.host().values()) <= 1e-5);
  CHECK(differing(leaves.host(), whole.host()) > m * n / 2);
}

TEST_CASE("transposed columns in invariant numerics are rows of the whole product, bit for bit") {
  const DType in = GENERATE(DType::kF32, DType::kBF16);
  const float beta = GENERATE(0.0f, 1.0f);
  const int64_t k = 1000, columns = 1536, n = 264;
  const HostTensor a = random_tensor(in, {k, columns}, 1), b = random_tensor(in, {k, n}, 2);
  const HostTensor before = random_tensor(DType::kF32, {columns, n}, 3);
  const DeviceTensor device_a(a), device_b(b), parts(before), whole(before);
  synchronize(gpu());
  const Stream stream = make_cuda_stream(0);
  for (const Range part : {Range{0, 256}, Range{256, 1000}, Range{1000, columns}}) {
    matmul_columns(stream, device_a, part, Transpose::kYes, device_b, parts.tensor().rows(part.begin, part.end), beta,
                   kInvariant);
  }
  matmul(stream, device_a, Transpose::kYes, device_b, Transpose::kNo, whole, beta, kInvariant);
  synchronize(stream);
  CHECK(parts.host().same_bits(whole.host()));
}

TEST_CASE("products of several samples in invariant numerics have the bits of one at a time, and are proved once") {
  const DType in = GENERATE(DType::kF32, DType::kBF16);
  const auto [m, n, tokens] = GENERATE(values<Size>({{3, 5, 7}, {512, 1024, 4096}, {264, 96, 40}}));
  const int64_t samples = 3, stride = m + 8;
  const Range columns{8, 8 + m};
  CAPTURE(name_of(in), m, n, tokens);
  const DeviceTensor a(random_tensor(in, {samples * tokens, stride}, 1)),
      b(random_tensor(in, {samples * tokens, n}, 2));
  const HostTensor before = random_tensor(DType::kF32, {samples, m, n}, 3);
  const DeviceTensor terms(before), expected(before);
  synchronize(gpu());
  const Stream stream = make_cuda_stream(0);
  matmul_samples(stream, a, columns, b, terms, kInvariant);
  const Proofs first = proofs(stream);
  CHECK(first.products + std::ssize(first.slow_products) == (in == DType::kBF16 ? 1 : 0));
  if (m == 512 && in == DType::kBF16) {
    CHECK(first.products == 1);
    CHECK(first.most_bytes == product_proof_bytes(a.tensor().bytes(), b.tensor().bytes(), 0));
  }
  for (const std::string& slow : first.slow_products) CHECK(contains(slow, format("3 times bf16 ({}, {})", tokens, m)));
  matmul_samples(stream, a, columns, b, terms, kInvariant);
  CHECK(proofs(stream).products == first.products);
  for (int64_t s = 0; s < samples; ++s) {
    const Range own{s * tokens, (s + 1) * tokens};
    matmul_columns(stream, a.tensor().rows(own.begin, own.end), columns, Transpose::kYes,
                   b.tensor().rows(own.begin, own.end), expected.tensor().rows(s, s + 1).view({m, n}), 0.0f,
                   kInvariant);
  }
  synchronize(stream);
  CHECK(terms.host().same_bits(expected.host()));
  CHECK(differing(terms.host(), before) > samples * m * n / 2);
  matmul_samples(gpu(), a, columns, b, terms);  // fast
  CHECK(relative_norm(terms.host().values(), expected.host().values()) <= 1e-5);
}

TEST_CASE("f32 products in invariant numerics have the bits of the CPU") {
  const bool ta = GENERATE(false, true), tb = GENERATE(false, true);
  const auto [m, n, k] = GENERATE(values<Size>(
      {{1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {1, 300, 129}, {300, 1, 129}, {64, 64, 16}, {130, 258, 1026}, {5, 7, 0}}));
  const int64_t offset = GENERATE(0, 1);
  const Stream stream = make_cuda_stream(0);
  for (const auto& [out, beta] : {std::pair{DType::kF32, 0.0f}, {DType::kF32, 1.0f}, {DType::kBF16, 0.0f}}) {
    CAPTURE(ta, tb, m, n, k, offset, name_of(out), beta);
    const Product product(m, n, k, ta, tb, DType::kF32, out, offset);
    CHECK(product.on(stream, beta, kInvariant).same_bits(product.expected(beta)));
  }
}

// What a proof is made of: operands that it fills, and a product of them.
struct Compared {
  Compared(int64_t m, int64_t n, int64_t k, DType out, bool accumulate)
      : a(HostTensor(DType::kBF16, {m, k})),
        b(HostTensor(DType::kBF16, {k, n})),
        c(HostTensor(out, {m, n})),
        product{a, {0, k}, false, b, false, c, accumulate} {
    synchronize(gpu());
    cuda::fill_for_comparison(stream.cuda(), product);
  }
  int64_t out_of_order() const { return cuda::count_out_of_order(stream.cuda(), product); }
  // Another value for an element of c.
  void alter(int64_t element) const {
    const Tensor flat = c.tensor().view({c.tensor().numel(), 1}).rows(element, element + 1);
    HostTensor value(c.tensor().dtype(), {1, 1});
    copy_across(stream, flat, value);
    value.set(0, value[0] == 0 ? 1 : value[0] * 1.0078125);  // by the last place of bf16 or more
    copy_across(stream, value, flat);
  }

  Stream stream = make_cuda_stream(0);
  DeviceTensor a, b, c;
  cuda::OrderedProduct product;
};

TEST_CASE("the comparison with the chain counts every altered element of what it looks at") {
  const auto [out, accumulate] =
      GENERATE(table<DType, bool>({{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}}));
  const auto [m, n, k] = GENERATE(values<Size>({{200, 136, 96}, {72, 520, 1000}, {8192, 4096, 64}}));
  CAPTURE(name_of(out), accumulate, m, n, k);
  const Compared compared(m, n, k, out, accumulate);
  CHECK(compared.out_of_order() > 0);  // nothing is multiplied yet
  matmul(compared.stream, compared.a, Transpose::kNo, compared.b, Transpose::kNo, compared.c, accumulate ? 1.0f : 0.0f,
         kInvariant);
  CHECK(compared.out_of_order() == 0);
  compared.alter(0);
  CHECK(compared.out_of_order() == 1);
  compared.alter(m * n - 1);
  CHECK(compared.out_of_order() == 2);
  if (m > 1000) return;  // a sample: of the other tiles some are not looked at
  compared.alter(m / 2 * n + n / 2);
  CHECK(compared.out_of_order() == 3);
}

TEST_CASE("our own bf16 kernel has the bits of the library's proved algorithms") {
  const auto [ta, tb] = GENERATE(table<bool, bool>({{false, false}, {false, true}, {true, false}, {true, true}}));
  const auto [out, accumulate] =
      GENERATE(table<DType, bool>({{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}}));
  const int64_t m = 200, n = 136, k = GENERATE(8, 104, 1000);  // no multiples of 16
  CAPTURE(ta, tb, name_of(out), accumulate, k);
  const HostTensor c = random_tensor(out, {m, n}, 3);
  const DeviceTensor a(random_tensor(DType::kBF16, {ta ? k : m, ta ? m : k}, 1));
  const DeviceTensor b(random_tensor(DType::kBF16, {tb ? n : k, tb ? k : n}, 2));
  const DeviceTensor own(c), library(c);
  synchronize(gpu());
  const Stream stream = make_cuda_stream(0);
  cuda::multiply_bf16_in_order(stream.cuda(), {a, {0, ta ? m : k}, ta, b, tb, own, accumulate});
  matmul(stream, a, Transpose{ta}, b, Transpose{tb}, library, accumulate ? 1.0f : 0.0f, kInvariant);
  synchronize(stream);
  CHECK(own.host().same_bits(library.host()));
  CHECK(relative_norm(own.host().values(), c.values()) > 0.5);  // something was multiplied
}

TEST_CASE("the comparison with the chain counts another order, in f32 and rounded to bf16") {
  const DType out = GENERATE(DType::kF32, DType::kBF16);
  const int64_t m = 128, n = 256, k = GENERATE(64, 1024, 4096);
  CAPTURE(name_of(out), k);
  const Compared compared(m, n, k, out, false);
  const DeviceTensor sums(HostTensor(DType::kF32, {m, n}));
  synchronize(gpu());
  const Tensor& b = compared.b.tensor();
  matmul_columns(compared.stream, compared.a, {0, k / 2}, Transpose::kNo, b.rows(0, k / 2), sums, 0.0f, kInvariant);
  matmul_columns(compared.stream, compared.a, {k / 2, k}, Transpose::kNo, b.rows(k / 2, k), sums, 1.0f, kInvariant);
  copy(compared.stream, sums, compared.c);
  CHECK(compared.out_of_order() > m * n / 3);
}

}  // namespace
}  // namespace invar::ops
