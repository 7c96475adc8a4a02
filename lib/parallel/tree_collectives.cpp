#include "parallel/tree_collectives.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {
constexpr int64_t kSliceBlock = 64;  // elements; slices begin where a cache line or a GPU's wide access does

// As on every other rank.
DType node_dtype(const TreePlan& plan, std::span<const Tensor> nodes) {
  if (nodes.empty() || nodes.front().dtype() != DType::kBF16) return DType::kF32;
  INVAR_CHECK(plan.one_leaf_each(), "bf16 nodes of {} leaves on {} ranks", plan.leaves(), plan.ranks());
  return DType::kBF16;
}

}  // namespace

LeafSum::LeafSum(const LeafProgram& program, std::vector<Tensor> buffers)
    : program_(program), buffers_(std::move(buffers)) {
  INVAR_CHECK(std::ssize(buffers_) >= program.buffers, "{} buffers of {}", buffers_.size(), program.buffers);
  INVAR_CHECK(program.steps.size() <= 1 || buffers_.front().dtype() == DType::kF32, "{} leaves are added in {}",
              program.steps.size(), name_of(buffers_.front().dtype()));
}

void LeafSum::put(const Stream& stream, const Tensor& leaf) const {
  if (accumulate()) {
    ops::add(stream, target(), leaf, target());
  } else {
    ops::copy(stream, leaf, target());
  }
}

void LeafSum::leaf_done(const Stream& stream) {
  join_buffers(stream, buffers_, step().buffer, step().joins);
  ++next_;
}

void join_buffers(const Stream& stream, std::span<const Tensor> buffers, int top, int joins) {
  for (; joins > 0; --joins, --top) {
    const Tensor& left = buffers[static_cast<size_t>(top) - 1];
    ops::add(stream, left, buffers[static_cast<size_t>(top)], left);
  }
}

std::vector<Tensor> nodes_of_leaves(const Stream& stream, const LeafProgram& program, std::span<const Tensor> leaves) {
  INVAR_CHECK(leaves.size() == program.steps.size(), "{} leaves of {}", leaves.size(), program.steps.size());
  std::vector<Tensor> nodes;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    nodes.push_back(leaves[leaf]);
    const LeafProgram::Step& step = program.steps[leaf];
    const int joins = step.joins + (step.accumulate ? 1 : 0);
    join_buffers(stream, nodes, static_cast<int>(nodes.size()) - 1, joins);
    nodes.resize(nodes.size() - static_cast<size_t>(joins));
  }
  return nodes;
}

void tree_reduce_scatter(const Stream& stream, Communicator& group, const TreePlan& plan, std::span<const Tensor> nodes,
                         std::span<const int64_t> counts, const Tensor& out, Arena& scratch) {
  const auto rank = static_cast<size_t>(group.rank());
  const int64_t own_nodes = std::ssize(plan.nodes(group.rank()));
  INVAR_CHECK(plan.ranks() == group.size() && std::ssize(counts) == group.size(),
              "a tree over {} ranks and {} counts, in group '{}' of {}", plan.ranks(), counts.size(), group.name(),
              group.size());
  const int64_t elements = std::reduce(counts.begin(), counts.end());
  INVAR_CHECK(std::ssize(nodes) == own_nodes, "{} nodes of {}", nodes.size(), own_nodes);
  const DType dtype = node_dtype(plan, nodes);
  for (const Tensor& node : nodes) {
    INVAR_CHECK(node.dims() == 1 && node.dim(0) == elements && node.dtype() == dtype,
                "a node is {}, not {} of {} elements", node.describe(), name_of(dtype), elements);
  }
  INVAR_CHECK(out.dims() == 1 && out.dim(0) == counts[rank], "{} is not {} elements", out.describe(), counts[rank]);
  if (group.size() == 1) {  // the root itself
    if (nodes[0].raw() != out.raw() || nodes[0].is_meta()) ops::copy(stream, nodes[0], out);
    return;
  }

  const ArenaScope staging(scratch);
  const Tensor received = scratch.allocate("nodes of a tree", dtype, {plan.total_nodes(), counts[rank]});
  for (int round = 0; round < plan.rounds(); ++round) {
    const bool gives = round < own_nodes;
    const std::vector<int64_t> nothing(counts.size(), 0);
    std::vector<int64_t> receive_counts;
    for (int r = 0; r < group.size(); ++r) {
      receive_counts.push_back(round < std::ssize(plan.nodes(r)) ? counts[rank] : 0);
    }
    const Range rows = plan.rows_of_round(round);
    group.all_to_all(stream, gives ? nodes[static_cast<size_t>(round)] : received.rows(0, 0),
                     gives ? counts : std::span<const int64_t>(nothing), received.rows(rows.begin, rows.end),
                     receive_counts);
  }
  ops::tree_sum(stream, plan.program(), received, out);
}

void tree_all_reduce(const Stream& stream, Communicator& group, const TreePlan& plan, std::span<const Tensor> nodes,
                     const Tensor& out, Arena& scratch) {
  INVAR_CHECK(out.dims() == 1, "{} is not of one dim", out.describe());
  std::vector<int64_t> counts;
  Range own;
  for (const Range& blocks : split_units(ceil_div(out.dim(0), kSliceBlock), group.size())) {
    const Range slice{std::min(out.dim(0), blocks.begin * kSliceBlock), std::min(out.dim(0), blocks.end * kSliceBlock)};
    if (std::ssize(counts) == group.rank()) own = slice;
    counts.push_back(slice.size());
  }
  const Tensor slice = out.rows(own.begin, own.end);
  tree_reduce_scatter(stream, group, plan, nodes, counts, slice, scratch);
  if (group.size() > 1) group.all_gather(stream, slice, out, counts);
}

}  // namespace invar
