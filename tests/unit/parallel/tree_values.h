#pragma once

#include <bit>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "parallel/worker_order.h"

// Sums whose bits show their order.
namespace invar::test {

using Elements = std::vector<float>;

// Values between 2^-12 and 2^12 of either sign: almost every order of a sum of them has other bits.
inline Elements wide_values(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  Elements values(static_cast<size_t>(count));
  for (float& value : values) {
    const double mantissa = 1.0 + std::ldexp(static_cast<double>(generator()), -32);
    const auto exponent = static_cast<int>(generator() % 25) - 12;
    value = static_cast<float>(std::ldexp(generator() % 2 == 0 ? mantissa : -mantissa, exponent));
  }
  return values;
}

// The tree's definition, one value per leaf: val[a, b) = val[a, m) + val[m, b), m = a + ceil((b - a) / 2).
template <class Leaf>
float tree_value(int64_t begin, int64_t end, const Leaf& leaf) {
  if (end - begin == 1) return leaf(begin);
  const int64_t middle = begin + (end - begin + 1) / 2;
  return tree_value(begin, middle, leaf) + tree_value(middle, end, leaf);
}

// The root of leaves (G, A), element by element.
inline Elements tree_root(const Elements& leaves, int64_t elements) {
  const int64_t count = std::ssize(leaves) / elements;
  Elements root;
  for (int64_t i = 0; i < elements; ++i) {
    root.push_back(
        tree_value(0, count, [&](int64_t leaf) { return leaves[static_cast<size_t>(leaf * elements + i)]; }));
  }
  return root;
}

inline bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}
inline int64_t different(const Elements& a, const Elements& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += same_bits(a[i], b[i]) ? 0 : 1;
  return count;
}

// The root of all ranks' nodes, brought to the rows where the plan wants them.
inline Elements root_of(const TreePlan& plan, const std::vector<Elements>& nodes, int64_t elements) {
  Elements rows;
  for (int round = 0; round < plan.rounds(); ++round) {
    for (size_t r = 0; r < nodes.size(); ++r) {
      if (round >= std::ssize(plan.nodes(static_cast<int>(r)))) continue;
      const auto node = nodes[r].begin() + round * elements;
      rows.insert(rows.end(), node, node + elements);
    }
    if (std::ssize(rows) != plan.rows_of_round(round).end * elements) throw std::logic_error("rows of a round");
  }
  Elements root(static_cast<size_t>(elements));
  const Tensor terms(rows.data(), DType::kF32, DeviceType::kCpu, {plan.total_nodes(), elements});
  ops::tree_sum(Stream(DeviceType::kCpu), plan.program(), terms, view_of(root));
  return root;
}

// Of data ranks with equal parts of the batch.
inline WorkerOrder equal_order(int64_t workers, int64_t batch, int data, int data_rank, int64_t micro_batch = 1) {
  std::vector<Range> samples;
  for (int64_t rank = 0; rank < data; ++rank) samples.push_back({batch * rank / data, batch * (rank + 1) / data});
  return {workers, batch, samples, data_rank, micro_batch};
}

// Contiguous runs of any sizes, some empty.
inline std::vector<Range> random_runs(int64_t leaves, int ranks, std::mt19937& generator) {
  std::vector<int64_t> cuts{0, leaves};
  for (int rank = 1; rank < ranks; ++rank) {
    cuts.push_back(static_cast<int64_t>(generator() % static_cast<uint64_t>(leaves + 1)));
  }
  std::ranges::sort(cuts);
  std::vector<Range> runs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) runs.push_back({cuts[i], cuts[i + 1]});
  return runs;
}

}  // namespace invar::test
