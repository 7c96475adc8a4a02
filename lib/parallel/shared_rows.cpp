#include "parallel/shared_rows.h"

#include <algorithm>
#include <set>

#include "core/integer.h"

namespace invar {
namespace {

// Rows of a parameter in the flat buffers of a rank.
struct HeldRows {
  Range rows;
  int world_rank = 0;
  int64_t begin = 0;
};

struct Holdings {
  std::vector<std::vector<HeldRows>> counted;  // of the first replica of each width, by rows
  std::vector<HeldRows> copies;
};

// Replicas of one width are cut alike: the first of each.
std::vector<int> first_of_each_width(const Topology& topology) {
  std::vector<int> firsts;
  for (int replica = 0; replica < topology.replicas(); ++replica) {
    const bool is_first =
        std::ranges::none_of(firsts, [&](int other) { return topology.width(other) == topology.width(replica); });
    if (is_first) firsts.push_back(replica);
  }
  return firsts;
}

Holdings holdings_of(const Topology& topology, std::span<const ParameterTable* const> tables, WeightId id,
                     size_t parameter) {
  Holdings all;
  for (const int replica : first_of_each_width(topology)) {
    std::vector<HeldRows>& counted = all.counted.emplace_back();
    for (int i = 0; i < topology.width(replica); ++i) {
      const int rank = topology.first_rank(replica) + i;
      const Weight& weight = tables[static_cast<size_t>(rank)]->weight(id);
      const Parameter& p = weight.parameters[parameter];
      for (const RowRun& run : p.runs) {
        if (run.global.empty()) continue;
        const HeldRows held{run.global, rank, weight.offset + run.local * weight.cols};
        (p.counted() ? counted : all.copies).push_back(held);
      }
    }
    std::ranges::sort(counted, {}, [](const HeldRows& held) { return held.rows.begin; });
  }
  return all;
}

// Whether `next` goes on where `last` ends, on every rank that has them; after the padding of a weight too.
bool goes_on(std::span<const ParameterTable* const> tables, const SharedBlock& last, const SharedBlock& next) {
  const int64_t gap = next.holders.front().begin - last.holders.front().begin - last.elements;
  const auto follows = [&](const std::vector<SharedBlock::Place>& a, const std::vector<SharedBlock::Place>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      const int64_t end = a[i].begin + last.elements;
      if (a[i].world_rank != b[i].world_rank || b[i].begin != end + gap) return false;
      const ParameterTable& table = *tables[static_cast<size_t>(a[i].world_rank)];
      const bool padded = end == table.weight(last.parts.back().weight).elements().end &&
                          b[i].begin == table.weight(next.parts.front().weight).offset &&
                          b[i].begin == round_up(end, ParameterTable::kAlignment);
      if (gap != 0 && !padded) return false;
    }
    return true;
  };
  return follows(last.holders, next.holders) && follows(last.copies, next.copies);
}

void join(std::vector<SharedBlock>& blocks, SharedBlock next, std::span<const ParameterTable* const> tables) {
  if (blocks.empty() || !goes_on(tables, blocks.back(), next)) {
    blocks.push_back(std::move(next));
    return;
  }
  SharedBlock& last = blocks.back();
  const int64_t begin = next.holders.front().begin - last.holders.front().begin;
  SharedBlock::Part part = next.parts.front();
  if (part.weight == last.parts.back().weight) {
    last.parts.back().elements += part.elements;
  } else {
    part.begin = begin;
    last.parts.push_back(part);
  }
  last.elements = begin + next.elements;
}

// Appends the rows of a weight, with holders and copies in the first replica of each width alone.
void append_shared_rows(const Topology& topology, std::span<const ParameterTable* const> tables, WeightId id,
                        std::vector<SharedBlock>& blocks) {
  const Weight& weight = tables.front()->weight(id);
  std::vector<SharedBlock> pieces;
  for (size_t p = 0; p < weight.parameters.size(); ++p) {
    const Holdings all = holdings_of(topology, tables, id, p);
    std::set<int64_t> cuts;
    for (const std::vector<HeldRows>& replica : all.counted) {
      for (const HeldRows& held : replica) cuts.insert({held.rows.begin, held.rows.end});
    }
    for (const HeldRows& held : all.copies) cuts.insert({held.rows.begin, held.rows.end});
    std::vector<size_t> next(all.counted.size());
    for (auto cut = cuts.begin(); cut != cuts.end() && std::next(cut) != cuts.end(); ++cut) {
      const Range rows{*cut, *std::next(cut)};
      SharedBlock piece;
      piece.elements = rows.size() * weight.cols;
      piece.parts = {{id, 0, piece.elements}};
      const auto place = [&](const HeldRows& held) {
        return SharedBlock::Place{held.world_rank, held.begin + (rows.begin - held.rows.begin) * weight.cols};
      };
      for (size_t replica = 0; replica < all.counted.size(); ++replica) {
        const std::vector<HeldRows>& held = all.counted[replica];
        size_t& i = next[replica];
        while (i < held.size() && held[i].rows.end <= rows.begin) ++i;
        INVAR_CHECK(i < held.size() && held[i].rows.begin <= rows.begin && rows.end <= held[i].rows.end,
                    "replica {} does not hold rows [{}, {}) of '{}' once", replica, rows.begin, rows.end,
                    weight.parameters[p].name);
        piece.holders.push_back(place(held[i]));
      }
      for (const HeldRows& held : all.copies) {
        if (intersect(held.rows, rows).size() == rows.size()) piece.copies.push_back(place(held));
      }
      pieces.push_back(std::move(piece));
    }
  }
  std::ranges::sort(pieces, {}, [](const SharedBlock& piece) {  // as they lie in the first replica
    return std::pair(piece.holders.front().world_rank, piece.holders.front().begin);
  });
  for (SharedBlock& piece : pieces) join(blocks, std::move(piece), tables);
}

// The places in all replicas of those in the first of each width.
class Spread {
 public:
  explicit Spread(const Topology& topology) : topology_(topology), firsts_(first_of_each_width(topology)) {
    for (int replica = 0; replica < topology.replicas(); ++replica) {
      first_ranks_.push_back(replica == 0 ? 0 : first_ranks_.back() + topology.width(replica - 1));
      const auto like =
          std::ranges::find_if(firsts_, [&](int first) { return topology.width(first) == topology.width(replica); });
      kind_.push_back(static_cast<size_t>(like - firsts_.begin()));
    }
  }

  void operator()(SharedBlock& block) const {
    std::vector<SharedBlock::Place> holders, copies;
    for (size_t replica = 0; replica < kind_.size(); ++replica) {
      const int first = first_ranks_[static_cast<size_t>(firsts_[kind_[replica]])];
      const int shift = first_ranks_[replica] - first, width = topology_.width(static_cast<int>(replica));
      holders.push_back(block.holders[kind_[replica]]);
      holders.back().world_rank += shift;
      for (const SharedBlock::Place& copy : block.copies) {
        const bool alike = first <= copy.world_rank && copy.world_rank < first + width;
        if (alike) copies.push_back({copy.world_rank + shift, copy.begin});
      }
    }
    block.holders = std::move(holders);
    block.copies = std::move(copies);
  }

 private:
  const Topology& topology_;
  std::vector<int> firsts_;
  std::vector<int> first_ranks_;  // of each replica
  std::vector<size_t> kind_;      // index of each replica's width in firsts_
};

}  // namespace

std::vector<SharedBlock> shared_rows(const Topology& topology, std::span<const ParameterTable* const> tables,
                                     std::span<const WeightId> weights) {
  std::vector<SharedBlock> blocks;
  for (const WeightId id : weights) append_shared_rows(topology, tables, id, blocks);
  const Spread spread(topology);
  for (SharedBlock& block : blocks) spread(block);
  return blocks;
}

}  // namespace invar
