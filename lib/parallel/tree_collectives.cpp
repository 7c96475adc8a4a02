#include "parallel/tree_collectives.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"
#include "ops/elementwise.h"
#include "parallel/unit_partition.h"

namespace invar {
namespace {
constexpr int64_t kSliceBlock = 64;  // elements; slices begin where a cache line or a GPU's wide access does
}  // namespace

LeafSum::LeafSum(const LeafProgram& program, const Tensor& buffers) : program_(program), buffers_(buffers) {
  INVAR_CHECK(buffers.dims() > 1 && buffers.dim(0) >= program.buffers && buffers.dtype() == DType::kF32,
              "{} is not {} buffers of f32", buffers.describe(), program.buffers);
}

void LeafSum::leaf_done(const Stream& stream) {
  const int top = step().buffer;
  for (int join = 0; join < step().joins; ++join) {
    const Tensor left = buffer(top - join - 1);
    ops::add(stream, left, buffer(top - join), left);
  }
  ++next_;
}

void tree_reduce_scatter(const Stream& stream, Communicator& group, const TreePlan& plan, const Tensor& nodes,
                         std::span<const int64_t> counts, const Tensor& out, Arena& scratch) {
  const auto rank = static_cast<size_t>(group.rank());
  const int64_t own_nodes = std::ssize(plan.nodes(group.rank()));
  INVAR_CHECK(plan.ranks() == group.size() && std::ssize(counts) == group.size(),
              "a tree over {} ranks and {} counts, in group '{}' of {}", plan.ranks(), counts.size(), group.name(),
              group.size());
  INVAR_CHECK(nodes.dims() == 2 && nodes.dim(0) == own_nodes && nodes.dtype() == DType::kF32 &&
                  nodes.dim(1) == std::reduce(counts.begin(), counts.end()),
              "{} is not f32 of {} nodes of {} elements", nodes.describe(), own_nodes,
              std::reduce(counts.begin(), counts.end()));
  INVAR_CHECK(out.dims() == 1 && out.dim(0) == counts[rank], "{} is not {} elements", out.describe(), counts[rank]);
  if (group.size() == 1) return ops::tree_sum(stream, plan.program(), nodes, out);

  const ArenaScope staging(scratch);
  const Tensor received = scratch.allocate("nodes of a tree", DType::kF32, {plan.total_nodes(), counts[rank]});
  for (int round = 0; round < plan.rounds(); ++round) {
    const bool gives = round < own_nodes;
    const std::vector<int64_t> nothing(counts.size(), 0);
    std::vector<int64_t> receive_counts;
    for (int r = 0; r < group.size(); ++r) {
      receive_counts.push_back(round < std::ssize(plan.nodes(r)) ? counts[rank] : 0);
    }
    const Range rows = plan.rows_of_round(round);
    group.all_to_all(stream, gives ? nodes.rows(round, round + 1) : nodes.rows(0, 0),
                     gives ? counts : std::span<const int64_t>(nothing), received.rows(rows.begin, rows.end),
                     receive_counts);
  }
  ops::tree_sum(stream, plan.program(), received, out);
}

void tree_all_reduce(const Stream& stream, Communicator& group, const TreePlan& plan, const Tensor& nodes,
                     const Tensor& out, Arena& scratch) {
  INVAR_CHECK(out.dims() == 1, "{} is not of one dim", out.describe());
  std::vector<int64_t> counts;
  Range own;
  for (const Range& blocks : split_units(ceil_div(out.dim(0), kSliceBlock), group.size())) {
    const Range slice{blocks.begin * kSliceBlock, std::min(out.dim(0), blocks.end * kSliceBlock)};
    if (std::ssize(counts) == group.rank()) own = slice;
    counts.push_back(slice.size());
  }
  const Tensor slice = out.rows(own.begin, own.end);
  tree_reduce_scatter(stream, group, plan, nodes, counts, slice, scratch);
  if (group.size() > 1) group.all_gather(stream, slice, out, counts);
}

}  // namespace invar
