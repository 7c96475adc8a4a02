#include <bit>

#include "block_hashes_case.h"

namespace invar::ops {
namespace {

using namespace invar::test;

TEST_CASE("add_block_hashes adds every element's term to the hash of its block") {
  const int threads = GENERATE(1, 3);
  for (const HashedForm& form : kHashedForms) {
    CAPTURE(form.rows, form.cols, threads);
    const HostTensor values = random_tensor(DType::kF32, {form.rows, form.cols}, 3);
    std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(form.numel)), -5);
    std::vector<uint64_t> expected(blocks.begin(), blocks.end());
    for (int64_t row = 0; row < form.rows; ++row) {
      for (int64_t col = 0; col < form.cols; ++col) {
        const int64_t at = form.index.at(row, col);
        const float value = values.tensor().data<float>()[row * form.cols + col];
        expected[static_cast<size_t>(at / kHashBlock)] += hash_term(at, std::bit_cast<uint32_t>(value));
      }
    }
    const HashedRows all{{0, form.rows}, form.index};
    add_block_hashes(Stream(DeviceType::kCpu, threads), values, {&all, 1}, view_of(blocks));
    CHECK(blocks == std::vector<int64_t>(expected.begin(), expected.end()));
  }
}

TEST_CASE("bf16 values, and fp32 ones as they are rounded to them, have the hashes of the same values in fp32") {
  for (const HashedForm& form : kHashedForms) {
    CAPTURE(form.rows, form.cols);
    const HostTensor values = random_tensor(DType::kF32, {form.rows, form.cols}, 3);
    HostTensor working(DType::kBF16, {form.rows, form.cols}), widened(DType::kF32, {form.rows, form.cols});
    for (int64_t i = 0; i < form.rows * form.cols; ++i) {
      working.tensor().data<BF16>()[i] = BF16(values.tensor().data<float>()[i]);
      widened.tensor().data<float>()[i] = static_cast<float>(working.tensor().data<BF16>()[i]);
    }
    const HashedRows all{{0, form.rows}, form.index};
    const auto hashes = [&](const Tensor& of, DType rounded) {
      std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(form.numel)));
      add_block_hashes(kTwoThreads, of, {&all, 1}, view_of(blocks), rounded);
      return blocks;
    };
    const std::vector<int64_t> expected = hashes(widened, DType::kF32);
    CHECK(hashes(working, DType::kF32) == expected);
    CHECK(hashes(values, DType::kBF16) == expected);
    CHECK(hashes(values, DType::kF32) != expected);
  }
}

TEST_CASE("add_block_hashes takes runs of rows of several tensors, in any order") {
  const InterleavedRuns runs;
  std::vector<int64_t> at_once(runs.blocks), one_by_one(runs.blocks);
  add_block_hashes(kTwoThreads, runs.values, runs.runs, view_of(at_once));
  for (const HashedRows& run : runs.runs) {
    const Tensor rows = runs.values.tensor().rows(run.rows.begin, run.rows.end);
    const HashedRows all{{0, run.rows.size()}, run.index};
    add_block_hashes(kCpu, rows, {&all, 1}, view_of(one_by_one));
  }
  CHECK(at_once == one_by_one);
  const HashedRows beyond{{150 * 32, 150 * 32 + 1}, {0, 40, 40, 0}};
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              add_block_hashes(kCpu, runs.values, {&beyond, 1}, view_of(at_once));
                            }),
                 "rows 4800 to 4801 of 4800"));
}

TEST_CASE("add_block_hashes of no elements, on meta, and where it must not") {
  std::vector<int64_t> sums = {7, 7};
  const Tensor blocks = view_of(sums);
  add_block_hashes(kCpu, HostTensor(DType::kF32, {0, 5}), {}, blocks);
  const HashedRows large{{0, 1 << 20}, {0, 1 << 20, 1 << 20, 0}};
  add_block_hashes(kMeta, Tensor(nullptr, DType::kF32, DeviceType::kMeta, {1 << 20, 1 << 20}), {&large, 1},
                   Tensor(nullptr, DType::kI64, DeviceType::kMeta, {1 << 28}));
  const auto refusal = [&](const Tensor& values, const LogicalIndex& index, const Stream& stream = kCpu) {
    const Tensor place(blocks.raw(), DType::kI64, stream.device(), blocks.shape());
    const HashedRows run{{0, values.dim(0)}, index};
    return message_of(ErrorKind::kFault, [&] { add_block_hashes(stream, values, {&run, 1}, place); });
  };
  CHECK(contains(refusal(Tensor(nullptr, DType::kF32, DeviceType::kMeta, {4, 6}), {0, 7, 6, 0}, kMeta), "7 from row"));
  CHECK(sums == std::vector<int64_t>{7, 7});
  const HostTensor values = random_tensor(DType::kF32, {4, 6}, 1);
  CHECK(contains(refusal(values, {0, 0, 0, 0}), "blocks of 0 of 6 columns"));
  CHECK(contains(refusal(values, {0, 2, 2, 7}), "4 rows of 2, 7 from block to block"));
  CHECK(contains(refusal(values, {100, 2, 2, -8}), "4 rows of 2, -8 from block to block"));
  std::vector<int32_t> integers(24);
  CHECK(contains(refusal(view_of(integers).view({4, 6}), {0, 6, 6, 0}), "add_block_hashes: values is i32 (4, 6)"));
  CHECK(contains(refusal(values, {0, 7, 6, 0}), "blocks of 6 of 6 columns, 7 from row to row"));
  CHECK(contains(refusal(values, {0, 4, 4, 10}), "blocks of 4 of 6 columns"));
  CHECK(contains(refusal(values, {2 * kHashBlock - 23, 6, 6, 0}), "elements 8169 to 8192, 2 blocks"));
  CHECK(contains(refusal(values, {-1, 6, 6, 0}), "elements -1 to 22"));
}

}  // namespace
}  // namespace invar::ops
