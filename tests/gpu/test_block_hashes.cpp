#include "block_hashes_case.h"
#include "like_cpu.h"

namespace invar::ops {
namespace {

using namespace invar::test;

std::vector<int64_t> on_gpu(const HostTensor& values, std::span<const HashedRows> runs, std::vector<int64_t> blocks,
                            DType rounded = DType::kF32) {
  const DeviceTensor sums(view_of(blocks));
  add_block_hashes(gpu(), DeviceTensor(values), runs, sums, rounded);
  copy_across(gpu(), sums, view_of(blocks));
  return blocks;
}

TEST_CASE("add_block_hashes on the GPU gives the CPU's sums, in every form of storage") {
  for (const HashedForm& form : kHashedForms) {
    CAPTURE(form.rows, form.cols);
    HostTensor values = random_tensor(DType::kF32, {form.rows, form.cols}, 3);
    const std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(form.numel)), -5);  // added to
    std::vector<int64_t> expected = blocks;
    const HashedRows all{{0, form.rows}, form.index};
    add_block_hashes(kCpu, values, {&all, 1}, view_of(expected));
    CHECK(on_gpu(values, {&all, 1}, blocks) == expected);
    values.set(values.size() / 2, 1e-30);
    CHECK(on_gpu(values, {&all, 1}, blocks) != expected);
  }
}

TEST_CASE("add_block_hashes on the GPU hashes bf16 values, and fp32 ones as they are rounded, as the CPU does") {
  for (const HashedForm& form : kHashedForms) {
    CAPTURE(form.rows, form.cols);
    const HashedRows all{{0, form.rows}, form.index};
    for (const auto& [dtype, rounded] : {std::pair(DType::kBF16, DType::kF32), std::pair(DType::kF32, DType::kBF16)}) {
      const HostTensor values = random_tensor(dtype, {form.rows, form.cols}, 3);
      std::vector<int64_t> expected(static_cast<size_t>(hash_blocks(form.numel)));
      const std::vector<int64_t> none = expected;
      add_block_hashes(kCpu, values, {&all, 1}, view_of(expected), rounded);
      CHECK(on_gpu(values, {&all, 1}, none, rounded) == expected);
    }
  }
}

TEST_CASE("add_block_hashes on the GPU takes runs of rows of several tensors") {
  const InterleavedRuns runs;
  std::vector<int64_t> expected(runs.blocks);
  add_block_hashes(kCpu, runs.values, runs.runs, view_of(expected));
  CHECK(on_gpu(runs.values, runs.runs, std::vector<int64_t>(runs.blocks)) == expected);
}

}  // namespace
}  // namespace invar::ops
