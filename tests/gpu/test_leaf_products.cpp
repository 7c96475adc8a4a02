#include "device_tensor.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "parallel/tree_collectives.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {

using namespace invar::test;

Stream invariant_stream() {
  Stream stream = make_cuda_stream(0);
  stream.set_invariant(true);
  return stream;
}

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
  const Stream stream = invariant_stream();
  size_t index = 0;
  for (LeafSum sum(cut.program, {buffers.begin(), buffers.end()}); !sum.finished(); sum.leaf_done(stream)) {
    const Range part = cut.columns[index++];
    ops::matmul_columns(stream, a, part, ops::Transpose::kNo, b.tensor().rows(part.begin, part.end), leaf);
    sum.put(stream, leaf);
  }
  synchronize(stream);
  const bool faster = run.size() > 2 || leaf_dtype == DType::kBF16 || k < 2 * 1024;
  const bool taken = cuda_architecture(0) == "sm90" && faster;
  const std::vector<Tensor> into(nodes.begin(), nodes.end());
  REQUIRE(ops::matmul_leaves(stream, a, b, cut.steps, leaf_dtype, into) == taken);
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
  REQUIRE(ops::matmul_leaves(stream, a, b, cut.steps, leaf_dtype, {&rounded.tensor(), 1}));
  synchronize(stream);
  CHECK(rounded.host().same_bits(wanted.host()));
}

TEST_CASE("leaves that no kernel takes are left to products") {
  const Cut odd(4, {0, 4}, 96, 8), many(32, {0, 32}, 1024, 16), right(4, {0, 4}, 64, 16), two(2, {0, 2}, 64, 16),
      long_ones(2, {0, 2}, 2048, 16);
  const Stream invariant = invariant_stream();
  const auto taken = [](const Stream& stream, const Cut& cut, int64_t n, DType dtype, DType leaf = DType::kF32) {
    const int64_t k = cut.columns.back().end;
    const DeviceTensor a(HostTensor(dtype, {16, k})), b(HostTensor(dtype, {k, n})),
        node(HostTensor(DType::kF32, {16, n}));
    const std::vector<Tensor> nodes{node};
    const bool done = ops::matmul_leaves(stream, a, b, cut.steps, leaf, nodes);
    synchronize(stream);
    return done;
  };
  CHECK(taken(invariant, right, 16, DType::kBF16) == (cuda_architecture(0) == "sm90"));
  CHECK_FALSE(taken(gpu(), right, 16, DType::kBF16));
  CHECK_FALSE(taken(invariant, right, 16, DType::kF32));
  CHECK_FALSE(taken(invariant, right, 12, DType::kBF16));
  CHECK_FALSE(taken(invariant, odd, 16, DType::kBF16));
  CHECK(taken(invariant, two, 16, DType::kBF16) == (cuda_architecture(0) == "sm90"));
  CHECK_FALSE(taken(invariant, long_ones, 16, DType::kBF16));  // not faster
  CHECK(taken(invariant, long_ones, 16, DType::kBF16, DType::kBF16) == (cuda_architecture(0) == "sm90"));
  CHECK_FALSE(taken(invariant, many, 16, DType::kBF16));  // five sums at once
}

}  // namespace
}  // namespace invar
