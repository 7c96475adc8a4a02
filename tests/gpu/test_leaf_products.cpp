#include "device_tensor.h"
#include "ops/cuda/operations.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "parallel/reduction_tree.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {

using namespace invar::test;

constexpr ops::Numerics kInvariant{true};

// A rank's part of a sum over `leaves`, which are cut from its `k` terms in parts of `unit`.
struct Cut {
  Cut(int64_t leaves, Range run, int64_t k, int64_t unit)
      : program(leaf_program(leaves, run, LeafKind::kAddable)),
        columns(split_units(k / unit, static_cast<int>(run.size()))) {
    for (Range& leaf : columns) leaf = {leaf.begin * unit, leaf.end * unit};
    for (const LeafProgram::Step& step : program.steps) {
      steps.push_back({columns[steps.size()], step.buffer, step.accumulate, step.joins});
    }
  }
  LeafProgram program;
  std::vector<Range> columns;
  std::vector<ops::LeafStep> steps;
};

struct Shape {
  int64_t m, n, k, unit;
};

TEST_CASE("a sum over leaves in one kernel has the bits of products and additions") {
  struct Part {
    int64_t leaves;
    Range run;
  };
  const auto [leaves, run] = GENERATE(values<Part>({{2, {0, 2}},
                                                    {8, {3, 5}},  // two nodes of a leaf
                                                    {3, {0, 3}},
                                                    {4, {0, 4}},
                                                    {5, {0, 5}},
                                                    {8, {0, 8}},
                                                    {8, {4, 8}},
                                                    {8, {3, 6}},  // two nodes
                                                    {8, {1, 8}},  // three
                                                    {16, {3, 10}},
                                                    {16, {0, 16}}}));
  const auto [m, n, k, unit] = GENERATE(values<Shape>({{256, 128, 1024, 64},
                                                       {100, 72, 640, 16},
                                                       {1, 8, 256, 16},
                                                       {700, 1000, 2048, 16},
                                                       {2600, 264, 512, 16},  // 11 pairs of tiles
                                                       {4096, 2560, 3072, 128}}));
  const DType leaf_dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(leaves, run.begin, run.end, m, n, k, unit, name_of(leaf_dtype));
  const Cut cut(leaves, run, k, unit);
  const DeviceTensor a(random_tensor(DType::kBF16, {m, k}, 1)), b(random_tensor(DType::kBF16, {k, n}, 2));
  const HostTensor unwritten(DType::kF32, {m, n});
  const DeviceTensor leaf(HostTensor(leaf_dtype, {m, n}));
  std::vector<DeviceTensor> buffers, nodes;
  for (int i = 0; i < cut.program.buffers; ++i) buffers.emplace_back(unwritten);
  for (size_t i = 0; i < cut.program.nodes.size(); ++i) nodes.emplace_back(unwritten);
  synchronize(gpu());
  const Stream stream = make_cuda_stream(0);
  const std::vector<Tensor> stack(buffers.begin(), buffers.end());
  const ops::LeafSpace space{stack, leaf_dtype == DType::kBF16 ? leaf.tensor() : Tensor()};
  ops::matmul_leaf_by_leaf(stream, a, b, cut.steps, space, kInvariant);
  synchronize(stream);
  const bool faster = run.size() > 2 || leaf_dtype == DType::kBF16 || k < 2 * 1024;
  const bool taken = cuda_architecture(0) == "sm90" && faster;
  const std::vector<Tensor> into(nodes.begin(), nodes.end());
  REQUIRE(ops::cuda::multiply_leaves(stream.cuda(), a, b, cut.steps, leaf_dtype, into) == taken);
  if (!taken) return;
  synchronize(stream);
  for (size_t node = 0; node < nodes.size(); ++node) {
    CAPTURE(node);
    const HostTensor made = nodes[node].host(), wanted = buffers[node].host();
    CHECK(made.same_bits(wanted));
    CHECK(relative_norm(made.values(), wanted.values()) < 1e-6);  // numbers
  }
  if (nodes.size() > 1) return;
  const HostTensor narrow(DType::kBF16, {m, n});
  const DeviceTensor rounded(narrow), wanted(narrow);
  synchronize(gpu());
  ops::copy(stream, buffers.front(), wanted);
  ops::matmul_leaves(stream, a, b, cut.steps, space, {&rounded.tensor(), 1}, kInvariant);
  synchronize(stream);
  CHECK(rounded.host().same_bits(wanted.host()));
}

TEST_CASE("leaves that the kernel does not take are added one by one, with the same bits") {
  const Cut odd(4, {0, 4}, 96, 8), many(32, {0, 32}, 1024, 16), right(4, {0, 4}, 64, 16), two(2, {0, 2}, 64, 16),
      long_ones(2, {0, 2}, 2048, 16);
  const Stream stream = make_cuda_stream(0);
  const auto taken = [&](const Cut& cut, int64_t n, DType dtype, DType leaf = DType::kF32) {
    const int64_t k = cut.columns.back().end;
    const HostTensor unwritten(DType::kF32, {16, n});
    const DeviceTensor a(random_tensor(dtype, {16, k}, 1)), b(random_tensor(dtype, {k, n}, 2)), node(unwritten),
        rounded(HostTensor(DType::kBF16, {16, n}));
    std::vector<DeviceTensor> buffers;
    for (int i = 0; i < cut.program.buffers; ++i) buffers.emplace_back(unwritten);
    synchronize(gpu());
    const std::vector<Tensor> stack(buffers.begin(), buffers.end()), nodes{node};
    const ops::LeafSpace space{stack, leaf == DType::kBF16 ? rounded.tensor() : Tensor()};
    const bool by_kernel = ops::cuda::multiply_leaves(stream.cuda(), a, b, cut.steps, leaf, nodes);
    ops::matmul_leaves(stream, a, b, cut.steps, space, nodes, kInvariant);
    synchronize(stream);
    const HostTensor made = node.host();
    ops::matmul_leaf_by_leaf(stream, a, b, cut.steps, space, kInvariant);
    synchronize(stream);
    CHECK(made.same_bits(buffers.front().host()));
    return by_kernel;
  };
  const bool has_kernel = cuda_architecture(0) == "sm90";
  CHECK(taken(right, 16, DType::kBF16) == has_kernel);
  CHECK_FALSE(taken(right, 16, DType::kF32));
  CHECK_FALSE(taken(right, 12, DType::kBF16));
  CHECK_FALSE(taken(odd, 16, DType::kBF16));
  CHECK(taken(two, 16, DType::kBF16) == has_kernel);
  CHECK_FALSE(taken(long_ones, 16, DType::kBF16));  // not faster
  CHECK(taken(long_ones, 16, DType::kBF16, DType::kBF16) == has_kernel);
  CHECK_FALSE(taken(many, 16, DType::kBF16));  // five sums at once
}

}  // namespace
}  // namespace invar
