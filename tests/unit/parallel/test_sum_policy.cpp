#include "parallel/sum_policy.h"

#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "ordered_table.h"
#include "parallel/leaf_cut.h"
#include "support/errors.h"
#include "support/rank_checks.h"

using namespace invar;
using test::Elements;

namespace {

constexpr int64_t kLeaves = 8, kTokens = 24, kColumns = 3;

NumericsContract contract() {
  NumericsContract contract;
  contract.leaves = kLeaves;
  contract.token_block = 2;
  contract.head_chunk_tokens = 4;
  return contract;
}

// a (T, kLeaves) and w (kLeaves, N): each leaf of their product is one of numbers, rounded to f32.
struct Operands {
  explicit Operands(DType dtype)
      : a(test::wide_values(kTokens * kLeaves, 7)), w(test::wide_values(kLeaves * kColumns, 8)) {
    if (dtype == DType::kBF16) {
      for (float& x : a) x = static_cast<float>(BF16(x));
      for (float& x : w) x = static_cast<float>(BF16(x));
    }
    for (int64_t unit = 0; unit < kLeaves; ++unit) {
      for (int64_t i = 0; i < kTokens * kColumns; ++i) {
        leaves.push_back(a[static_cast<size_t>(i / kColumns * kLeaves + unit)] *
                         w[static_cast<size_t>(unit * kColumns + i % kColumns)]);
      }
    }
  }
  // These units of both, of the dtype.
  std::pair<Tensor, Tensor> of(Arena& arena, Range units, DType dtype) const {
    const Tensor left = arena.allocate("a", dtype, {kTokens, units.size()});
    const Tensor right = arena.allocate("w", dtype, {units.size(), kColumns});
    const auto put = [&](const Tensor& to, int64_t at, float x) {
      if (dtype == DType::kF32) to.data<float>()[at] = x;
      if (dtype == DType::kBF16) to.data<BF16>()[at] = BF16(x);
    };
    for (int64_t i = 0; i < left.numel(); ++i) {
      put(left, i, a[static_cast<size_t>(i / units.size() * kLeaves + units.begin + i % units.size())]);
    }
    for (int64_t i = 0; i < right.numel(); ++i) put(right, i, w[static_cast<size_t>(units.begin * kColumns + i)]);
    return {left, right};
  }

  Elements a, w;
  Elements leaves;  // (kLeaves, T, N)
};

// Elements of the product that a rank has otherwise than the definition says.
int64_t wrong_elements(Communicator& world, const SumPolicy& policy, bool sequence, DType dtype, int64_t rows_at_once) {
  const Stream stream(DeviceType::kCpu);
  const Operands operands(dtype);
  const Elements expected = test::tree_root(operands.leaves, kTokens * kColumns);
  TensorRegion region(world, sequence, policy.token_block());
  region.set_tokens(kTokens);
  Arena scratch("scratch", DeviceType::kCpu, 1 << 14);
  const SumContext ctx{stream, region, scratch, dtype, kTokens};
  const UnitCut cut = policy.cut(kLeaves, world);
  const auto [a, w] = operands.of(scratch, cut.mine(), dtype);
  const CutDim dim = cut.dim(1);
  const std::unique_ptr<CutProduct> product = policy.product(ctx, dim, kColumns);
  if (rows_at_once == kTokens) {
    product->multiply(a, w);
  } else {
    for (int64_t row = 0; row < kTokens; row += rows_at_once) {
      product->multiply_rows(row, a.rows(row, row + rows_at_once), w);
    }
  }
  const Tensor sum = product->sum();
  const Range mine = region.local_tokens();
  REQUIRE(sum.dtype() == dtype);
  REQUIRE(sum.dim(0) == mine.size());
  REQUIRE(sum.dim(1) == kColumns);
  int64_t wrong = 0;
  for (int64_t i = 0; i < sum.numel(); ++i) {
    const float want = expected[static_cast<size_t>(mine.begin * kColumns + i)];
    const bool same = dtype == DType::kF32 ? test::same_bits(sum.data<float>()[i], want)
                                           : sum.data<BF16>()[i].bits == BF16(want).bits;
    wrong += same ? 0 : 1;
  }
  return wrong;
}

}  // namespace

TEST_CASE("an invariant product over a cut dim has the bits of the tree of its leaves at any number of ranks") {
  for (const int ranks : {1, 2, 3, 4, 6, 8}) {
    for (const bool sequence : {false, true}) {
      run_thread_ranks(ranks, [&](Communicator& world) {
        const std::unique_ptr<SumPolicy> policy = invariant_sums(contract(), std::nullopt, Stream(DeviceType::kCpu));
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          for (const int64_t rows_at_once : {kTokens, int64_t{8}}) {
            const int64_t wrong = wrong_elements(world, *policy, sequence, dtype, rows_at_once);
            CHECK(wrong == 0);
          }
        }
      });
    }
  }
}

TEST_CASE("a fast product over a cut dim is the same sum in another order") {
  run_thread_ranks(3, [&](Communicator& world) {
    const int64_t wrong = wrong_elements(world, *fast_sums(), false, DType::kF32, kTokens);
    CHECK(wrong > 10);
  });
}

TEST_CASE("copies have parts of a gradient in fast numerics alone, and only if their layers make parts") {
  const auto group = make_self_communicator("tensor");
  const std::unique_ptr<SumPolicy> fast = fast_sums();
  const std::unique_ptr<SumPolicy> invariant = invariant_sums(contract(), std::nullopt, Stream(DeviceType::kCpu));
  const auto parts = [](const SumPolicy& policy, Communicator* copies, bool in_parts) {
    Parameter parameter;
    policy.set_copies(parameter, copies, in_parts);
    return parameter.replicas == copies ? std::optional(parameter.partial_gradient) : std::nullopt;
  };
  CHECK(parts(*fast, group.get(), true) == true);
  CHECK(parts(*fast, group.get(), false) == false);
  CHECK(parts(*fast, nullptr, true) == false);
  CHECK(parts(*invariant, group.get(), true) == false);
  CHECK(parts(*invariant, group.get(), false) == false);
}

TEST_CASE("cuts have leaves and gradients have buffers as the contract and the samples say, none in fast numerics") {
  const auto group = make_self_communicator("tensor");
  const Stream stream(DeviceType::kCpu);
  const std::unique_ptr<SumPolicy> fast = fast_sums();
  CHECK(fast->cut(20, *group).dim(1) == nullptr);
  CHECK(fast->cut_heads(8, 2, *group).dim(1, 2) == nullptr);
  CHECK(fast->token_block() == 0);
  CHECK(fast->gradient_layout().buffers == 1);
  CHECK_FALSE(fast->gradient_layout().separate_users);

  const WorkerOrder order = test::equal_order(12, 12, 1, 0, 1);
  REQUIRE(order.kept() > 1);
  const std::unique_ptr<SumPolicy> invariant = invariant_sums(contract(), order, stream);
  REQUIRE(invariant->cut(20, *group).dim(1) != nullptr);
  CHECK(std::ssize(invariant->cut(20, *group).dim(1)->rows) == kLeaves);
  REQUIRE(invariant->cut_heads(8, 2, *group).run_sum() != nullptr);
  CHECK(invariant->token_block() == 2);
  CHECK(invariant->gradient_layout().buffers == order.kept());
  CHECK(invariant->gradient_layout().separate_users);

  const std::unique_ptr<SumPolicy> layout = invariant_sums(contract(), std::nullopt, stream);
  CHECK(layout->gradient_layout().buffers == 1);
  ParameterTable table;
  test::Done done;
  CHECK(test::contains(test::message_of(ErrorKind::kFault, [&] { (void)layout->gradients(table, done); }),
                       "sums over samples of a layout without a step"));
}

TEST_CASE("invariant numerics take chunks of the head from the contract, or whole samples, fast ones what is best") {
  const auto group = make_self_communicator("tensor");
  const Stream stream(DeviceType::kCpu);
  const TensorRegion region(*group, false);
  Arena scratch("scratch", DeviceType::kCpu, 0);
  const auto chunk = [&](const SumPolicy& policy, int64_t sequence_length, int64_t best) {
    return policy.head_chunk({stream, region, scratch, DType::kF32, sequence_length}, best);
  };
  const std::unique_ptr<SumPolicy> fast = fast_sums();
  const std::unique_ptr<SumPolicy> invariant = invariant_sums(contract(), std::nullopt, stream);
  CHECK(chunk(*fast, 8, 5) == 5);
  CHECK(chunk(*invariant, 8, 5) == 4);  // a part of a sample, whatever is best
  CHECK(chunk(*invariant, 8, 100) == 4);
  CHECK(chunk(*invariant, 4, 3) == 4);  // whole samples
  CHECK(chunk(*invariant, 4, 11) == 8);
}

TEST_CASE("the memory of proofs is noted for invariant numerics of a GPU's dry run alone") {
  const auto noted = [](const SumPolicy& policy) { return policy.numerics().proof_bytes != nullptr; };
  const auto invariant = [](const Stream& stream) { return invariant_sums(contract(), std::nullopt, stream); };
  CHECK(noted(*invariant(Stream::meta(DeviceType::kCuda))));
  CHECK_FALSE(noted(*invariant(Stream::meta(DeviceType::kCpu))));
  CHECK_FALSE(noted(*invariant(Stream(DeviceType::kMeta))));
  CHECK_FALSE(noted(*invariant(Stream(DeviceType::kCpu))));
  CHECK_FALSE(noted(*fast_sums()));
  CHECK(invariant(Stream(DeviceType::kCpu))->numerics().invariant);
  CHECK_FALSE(fast_sums()->numerics().invariant);

  const std::unique_ptr<SumPolicy> policy = invariant(Stream::meta(DeviceType::kCuda));
  policy->numerics().note_proof(7);
  policy->numerics().note_proof(3);
  CHECK(policy->proof_bytes() == 7);
}
