#include "parallel/unit_cut.h"

#include <algorithm>

#include "core/error.h"
#include "parallel/leaf_cut.h"
#include "parallel/unit_partition.h"

namespace invar {

namespace {

// Units of each leaf, and leaves of each rank.
std::vector<Range> make_leaves(int64_t units, int64_t leaves) {
  return leaves == 0 ? std::vector<Range>() : split_units(units, static_cast<int>(std::min(leaves, units)));
}
std::vector<Range> deal_leaves(const std::vector<Range>& leaves, int ranks) {
  if (leaves.empty()) return {};
  INVAR_CHECK(ranks <= std::ssize(leaves), "{} leaves for {} ranks", leaves.size(), ranks);
  return choose_runs(std::ssize(leaves), ranks);
}

}  // namespace

std::vector<Range> unit_runs(int64_t units, int64_t leaves, int ranks) {
  if (leaves == 0) return split_units(units, ranks);
  const std::vector<Range> units_of = make_leaves(units, leaves);
  std::vector<Range> runs;
  for (const Range& held : deal_leaves(units_of, ranks)) {
    runs.push_back({units_of[static_cast<size_t>(held.begin)].begin, units_of[static_cast<size_t>(held.end) - 1].end});
  }
  return runs;
}

UnitCut::UnitCut(int64_t units, int64_t leaves, int ranks, int rank)
    : rank_(static_cast<size_t>(rank)),
      runs_(unit_runs(units, leaves, ranks)),
      leaves_(make_leaves(units, leaves)),
      leaves_of_(deal_leaves(leaves_, ranks)) {}

int64_t UnitCut::widest() const {
  return std::ranges::max_element(runs_, {}, &Range::size)->size();
}

CutDim UnitCut::dim(int64_t rows_per_unit, int64_t repeats) const {
  if (leaves_.empty()) return nullptr;
  std::vector<Range> runs = leaves_of_;
  for (Range& run : runs) run = {run.begin * repeats, run.end * repeats};
  std::vector<Range> rows;
  for (int64_t leaf = leaves_of_[rank_].begin; leaf < leaves_of_[rank_].end; ++leaf) {
    const Range units = leaves_[static_cast<size_t>(leaf)];
    for (int64_t dim = 0; dim < repeats; ++dim) {
      const int64_t first = dim * mine().size() - mine().begin;
      rows.push_back({(first + units.begin) * rows_per_unit, (first + units.end) * rows_per_unit});
    }
  }
  return std::make_shared<const LeafCut>(runs, rank_, std::move(rows), repeats == 1);
}

}  // namespace invar
