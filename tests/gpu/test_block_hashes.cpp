#include "block_hashes_case.h"
#include "like_cpu.h"

namespace invar::ops {
namespace {

using namespace invar::test;

std::vector<int64_t> on_gpu(const HostTensor& values, const LogicalIndex& index, std::vector<int64_t> blocks) {
  const DeviceTensor sums(view_of(blocks));
  add_block_hashes(gpu(), DeviceTensor(values), index, sums);
  copy_across(gpu(), sums, view_of(blocks));
  return blocks;
}

TEST_CASE("add_block_hashes on the GPU gives the CPU's sums, in every form of storage") {
  for (const HashedForm& form : kHashedForms) {
    CAPTURE(form.rows, form.cols);
    HostTensor values = random_tensor(DType::kF32, {form.rows, form.cols}, 3);
    const std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(form.numel)), -5);  // added to
    std::vector<int64_t> expected = blocks;
    add_block_hashes(kCpu, values, form.index, view_of(expected));
    CHECK(on_gpu(values, form.index, blocks) == expected);
    values.set(values.size() / 2, 1e-30);
    CHECK(on_gpu(values, form.index, blocks) != expected);
  }
}

}  // namespace
}  // namespace invar::ops
