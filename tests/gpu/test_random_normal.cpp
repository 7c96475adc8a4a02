#include "ops/random_normal.h"

#include "like_cpu.h"

namespace invar::ops {
namespace {

using namespace invar::test;

TEST_CASE("random_normal on the GPU gives the CPU's bits, in every form of storage") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // A logical (1001, 770), rows [300, 1001) of it; transposed, its columns [300, 770) one by one; and in pairs.
  struct Form {
    LogicalIndex index;
    int64_t rows, cols;
  };
  const Form form = GENERATE(Form{{300 * 770, 770, 770, 0}, 701, 770}, Form{{300, 1, 1, 770}, 470, 1001},
                             Form{{300, 2, 2, 770}, 235, 2002});
  NormalValues values{Philox(5, RandomPurpose::kWeights, 77), 0.25, 0.02, form.index, {400 * 770, 401 * 770}};
  const HostTensor expected(dtype, {form.rows, form.cols});
  const DeviceTensor actual(HostTensor(dtype, {form.rows, form.cols}));
  random_normal(kCpu, values, expected);
  random_normal(gpu(), values, actual);
  CHECK(actual.host().same_bits(expected));
  values.random = Philox(6, RandomPurpose::kWeights, 77);
  random_normal(gpu(), values, actual);
  CHECK_FALSE(actual.host().same_bits(expected));
}

TEST_CASE("random_normal on the GPU gives the CPU's bits far from the first element, and of millions of them") {
  const int64_t rows = 4096;
  const NormalValues values{Philox(9, RandomPurpose::kWeights, 1), 0.0, 1.0, {int64_t{1} << 40, 1000, 1000, 0}, {}};
  const HostTensor expected(DType::kF32, {rows, 1000});
  const DeviceTensor actual(HostTensor(DType::kF32, {rows, 1000}));
  random_normal(kCpu, values, expected);
  random_normal(gpu(), values, actual);
  CHECK(actual.host().same_bits(expected));
}

}  // namespace
}  // namespace invar::ops
