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
  std::vector<std::vector<HeldRows>> counted;  // of each replica, by rows
  std::vector<HeldRows> copies;
};

Holdings holdings_of(const Topology& topology, std::span<const ParameterTable* const> tables, WeightId id,
                     size_t parameter) {
  Holdings all;
  for (int replica = 0; replica < topology.data; ++replica) {
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

}  // namespace

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

}  // namespace invar
