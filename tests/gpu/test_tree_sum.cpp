#include "ops/tree_sum.h"

#include "like_cpu.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// Pushes `depth` terms before the first addition, then a chain: (t0 + (t1 + ...)) + ... in the end.
SumProgram program_of(int terms, int depth) {
  SumProgram program;
  for (int t = 0; t < terms; ++t) {
    const int joins = t + 1 < depth ? 0 : t + 1 == depth ? depth - 1 : 1;
    program.add_term((t * 5 + 3) % terms, joins);
  }
  return program;
}

TEST_CASE("tree_sum on the GPU gives the CPU's bits") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(0, 1, 3, 8, 1000, 1024, 4099);
  // The stack is of 2, 4, 8 or more registers.
  const int depth = GENERATE(1, 2, 4, 5, 8, 9, SumProgram::kMaxDepth);
  const int terms = depth + GENERATE(0, 2, 3);  // 2 or 4 are read at once
  const HostTensor from = random_tensor(DType::kF32, {terms, n}, 1);
  HostTensor out(dtype, {n});
  const DeviceTensor device_from(from), device_out(out);
  const SumProgram program = program_of(terms, depth);
  tree_sum(kCpu, program, from, out);
  tree_sum(gpu(), program, device_from, device_out);
  CHECK(device_out.host().same_bits(out));
}

TEST_CASE("tree_sum on the GPU of rows for each of several gives the CPU's bits") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16), out_dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t n = GENERATE(1, 6, 8, 1000);
  const int depth = GENERATE(1, 4, 7);
  const int rows = depth + 2;
  const HostTensor from = random_tensor(dtype, {37, rows, n}, 1);
  HostTensor out(out_dtype, {37, n});
  const DeviceTensor device_from(from), device_out(out);
  tree_sum(kCpu, program_of(rows, depth), from, out);
  tree_sum(gpu(), program_of(rows, depth), device_from, device_out);
  CHECK(device_out.host().same_bits(out));
}

TEST_CASE("tree_sum on the GPU of one term, and into a row of the terms") {
  const int64_t n = GENERATE(8, 1001);
  const HostTensor from = random_tensor(DType::kF32, {3, n}, 1);
  const DeviceTensor device_from(from);
  HostTensor copied(DType::kF32, {n});
  const DeviceTensor device_copied(copied);
  tree_sum(kCpu, program_of(1, 1), from.tensor().rows(0, 1), copied);
  tree_sum(gpu(), program_of(1, 1), device_from.tensor().rows(0, 1), device_copied);
  CHECK(device_copied.host().same_bits(copied));

  const auto middle = [&](const Tensor& terms) { return terms.rows(1, 2).view({n}); };
  tree_sum(gpu(), program_of(3, 3), device_from, middle(device_from));
  tree_sum(kCpu, program_of(3, 3), from, middle(from));
  CHECK(device_from.host().same_bits(from));
}

}  // namespace
}  // namespace invar::ops
