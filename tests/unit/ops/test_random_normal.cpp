#include "ops/random_normal.h"

#include <cmath>

#include "host_tensor.h"

namespace invar::ops {
namespace {

using namespace invar::test;

const Philox kRandom(5, RandomPurpose::kWeights, 7);

TEST_CASE("random_normal fills every form of storage by the place in the logical tensor") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int threads = GENERATE(1, 3);
  // Of a logical (300, 202) rows 100 to 299 (as stored); transposed, its columns 100 to 199 one by one; and in pairs.
  struct Form {
    LogicalIndex index;
    int64_t rows, cols;
  };
  const Form form = GENERATE(Form{{100 * 202, 202, 202, 0}, 200, 202}, Form{{100, 1, 1, 202}, 100, 300},
                             Form{{100, 2, 2, 202}, 50, 600});
  HostTensor out(dtype, {form.rows, form.cols});
  const Range zeros{150 * 202, 151 * 202};
  random_normal(Stream(DeviceType::kCpu, threads), {kRandom, 0.25, 0.02, form.index, zeros}, out);
  int64_t wrong = 0, zero = 0;
  for (int64_t i = 0; i < form.rows * form.cols; ++i) {
    const int64_t row = i / form.cols, col = i % form.cols;
    const bool transposed = form.index.block_stride != 0;
    const int64_t block = form.index.block;
    const int64_t logical_row = transposed ? col / block : 100 + row;
    const int64_t logical_column = transposed ? 100 + row * block + col % block : col;
    const auto value =
        static_cast<float>(0.25 + 0.02 * kRandom.normal(static_cast<uint64_t>(logical_row * 202 + logical_column)));
    const float stored = dtype == DType::kF32 ? value : static_cast<float>(BF16(value));
    const double expected = logical_row == 150 ? 0.0 : static_cast<double>(stored);
    wrong += out[static_cast<size_t>(i)] != expected;
    zero += out[static_cast<size_t>(i)] == 0;
  }
  CHECK(wrong == 0);
  CHECK(zero == (form.index.block_stride == 0 ? 202 : 100));
}

TEST_CASE("random_normal of no elements, on meta, and into what it does not fill") {
  const NormalValues values{kRandom};
  random_normal(kCpu, values, HostTensor(DType::kF32, {0, 5}));
  random_normal(kCpu, values, HostTensor(DType::kF32, {5, 0}));
  random_normal(kMeta, values, Tensor(nullptr, DType::kBF16, DeviceType::kMeta, {1 << 20, 1 << 20}));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { random_normal(kCpu, values, HostTensor(DType::kF32, {5})); }),
                 "random_normal: out is f32 (5)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              random_normal(kCpu, values, HostTensor(DType::kI32, {5, 1}));
                            }),
                 "random_normal: out is i32"));
}

}  // namespace
}  // namespace invar::ops
