#include <cmath>

#include "core/philox.h"
#include "ops/matmul.h"
#include "parallel/tree_collectives.h"
#include "parallel/unit_partition.h"
#include "support/catch.h"

using namespace invar;

namespace {

constexpr int64_t kRows = 48, kTerms = 4096;
const Stream kCpu(DeviceType::kCpu);

std::vector<BF16> normal_values(const char* name) {
  const Philox random(3, RandomPurpose::kWeights, hash_name(name));
  std::vector<BF16> values(static_cast<size_t>(kRows * kTerms));
  for (size_t i = 0; i < values.size(); ++i) values[i] = BF16(static_cast<float>(random.normal(i)));
  return values;
}

// The mean distance to sums in fp64 of all products of rows of a (kRows, kTerms) and columns of b (kTerms, kRows).
struct Case {
  std::vector<BF16> left = normal_values("a"), right = normal_values("b");
  Tensor a = view_of(left).view({kRows, kTerms}), b = view_of(right).view({kTerms, kRows});

  double error(const std::vector<float>& sums) const {
    double total = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kRows; ++j) {
        double exact = 0;
        for (int64_t k = 0; k < kTerms; ++k) {
          exact += double{static_cast<float>(left[static_cast<size_t>(i * kTerms + k)])} *
                   double{static_cast<float>(right[static_cast<size_t>(k * kRows + j)])};
        }
        total += std::abs(exact - double{sums[static_cast<size_t>(i * kRows + j)]});
      }
    }
    return total / static_cast<double>(kRows * kRows);
  }

  // The products over each of `parts` runs of the terms.
  std::vector<std::vector<float>> products(int parts) const {
    std::vector<std::vector<float>> made;
    for (const Range& terms : split_units(kTerms, parts)) {
      made.emplace_back(static_cast<size_t>(kRows * kRows));
      const Tensor out = view_of(made.back()).view({kRows, kRows});
      ops::matmul_columns(kCpu, a, terms, ops::Transpose::kNo, b.rows(terms.begin, terms.end), out);
    }
    return made;
  }
};

}  // namespace

TEST_CASE("a tree of leaves is nearer to fp64 than one chain, and than ranks in turn") {
  const Case sums;
  const double chain = sums.error(sums.products(1).front());
  std::vector<std::vector<float>> of_ranks = sums.products(4);
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    for (size_t i = 0; i < of_ranks[0].size(); ++i) of_ranks[0][i] += of_ranks[rank][i];
  }
  const double in_turn = sums.error(of_ranks[0]);
  std::vector<std::vector<float>> leaf_values = sums.products(8);
  std::vector<Tensor> leaves;
  for (std::vector<float>& leaf : leaf_values) leaves.push_back(view_of(leaf));
  nodes_of_leaves(kCpu, leaf_program(8, {0, 8}, LeafKind::kAddable), leaves);
  const double tree = sums.error(leaf_values[0]);
  CAPTURE(chain, in_turn, tree);
  CHECK(tree < 0.5 * chain);
  CHECK(tree < in_turn);
}
