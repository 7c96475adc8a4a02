#include "train/copy_check.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "core/split_mix.h"
#include "device/device.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

constexpr int64_t kAbsent = std::numeric_limits<int64_t>::max();  // beyond every minimum
constexpr size_t kNamed = 3;                                      // differences in a message
constexpr size_t kLooks = 64;                                     // that are told apart
constexpr size_t kListed = 8;                                     // ranks in a list of them

// The rows of a parameter that this rank holds, neighbours joined.
std::vector<Range> held_rows(const Parameter& parameter) {
  std::vector<Range> rows;
  for (const RowRun& run : parameter.runs) rows.push_back(run.global);
  std::sort(rows.begin(), rows.end(), [](Range a, Range b) { return a.begin < b.begin; });
  std::vector<Range> joined;
  for (const Range& range : rows) {
    if (range.empty()) continue;
    if (!joined.empty() && joined.back().end == range.begin) {
      joined.back().end = range.end;
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

// The numbers of all ranks, rank by rank.
std::vector<std::vector<int64_t>> gather(Communicator& group, std::vector<int64_t> mine) {
  const Stream host(DeviceType::kCpu);
  std::vector<int64_t> own_count = {std::ssize(mine)}, counts(static_cast<size_t>(group.size()));
  group.all_gather(host, view_of(own_count), view_of(counts), equal_counts(group.size(), 1));
  std::vector<int64_t> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  group.all_gather(host, view_of(mine), view_of(all), counts);
  std::vector<std::vector<int64_t>> ranks;
  auto next = all.begin();
  for (const int64_t count : counts) {
    ranks.emplace_back(next, next + count);
    next += count;
  }
  return ranks;
}

// Modulo 2⁶⁴.
int64_t wrapping_sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

void add(std::vector<int64_t>& sums, const std::vector<int64_t>& terms, int64_t factor = 1) {
  for (size_t i = 0; i < sums.size(); ++i) {
    const uint64_t term = static_cast<uint64_t>(factor) * static_cast<uint64_t>(terms[i]);
    sums[i] = wrapping_sum(sums[i], static_cast<int64_t>(term));
  }
}

// "rank 2", "ranks 0, 1, 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 24 more"
std::string list_first_ranks(const std::vector<size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < std::min(ranks.size(), kListed); ++i) text += format("{}{}", i == 0 ? " " : ", ", ranks[i]);
  return ranks.size() > kListed ? format("{} and {} more", text, ranks.size() - kListed) : text;
}

}  // namespace

// Hashes of segments, each in blocks of its own, as many at once as there is room for. The hash of a segment is a sum
// over its blocks, so that it may be added up of any parts of them.
class CopyCheck::Pass {
 public:
  Pass(const Stream& stream, const Tensor& room, const std::vector<Segment>& segments)
      : stream_(stream), room_(room), segments_(segments), place_(segments.size(), -1), sums_(segments.size()) {
    ops::zero(stream, room);
  }

  bool fits(size_t segment) const { return place_[segment] >= 0 || next_ + blocks_of(segment) <= room_.dim(0); }
  // The first element of its blocks.
  int64_t place(size_t segment) {
    if (place_[segment] < 0) {
      INVAR_CHECK(fits(segment), "{} blocks of hashes, room for {}", blocks_of(segment), room_.dim(0));
      place_[segment] = std::exchange(next_, next_ + blocks_of(segment));
      placed_.push_back(segment);
    }
    return place_[segment] * kHashBlock;
  }
  // Makes room. Nothing that was placed may be added to before it is placed again.
  void flush() {
    if (next_ == 0) return;
    std::vector<int64_t> blocks(static_cast<size_t>(next_));
    const Tensor used = room_.rows(0, next_);
    copy_across(stream_, used, view_of(blocks));
    ops::zero(stream_, used);
    for (const size_t segment : placed_) {
      const auto first = static_cast<size_t>(std::exchange(place_[segment], -1));
      const auto count = static_cast<uint64_t>(blocks_of(segment));
      uint64_t sum = 0;  // by odd factors, so that one block that differs always shows
      for (uint64_t i = 0; i < count; ++i) sum += (split_mix(i) | 1) * static_cast<uint64_t>(blocks[first + i]);
      sums_[segment] = wrapping_sum(sums_[segment], static_cast<int64_t>(sum));
    }
    placed_.clear();
    next_ = 0;
  }
  Sums sums() {
    flush();
    return sums_;
  }

 private:
  int64_t blocks_of(size_t segment) const {
    const Segment& s = segments_[segment];
    return hash_blocks(s.rows.size() * s.parameter->cols());
  }

  const Stream& stream_;
  const Tensor& room_;
  const std::vector<Segment>& segments_;
  std::vector<int64_t> place_;  // first block of a segment; −1: none
  std::vector<size_t> placed_;
  int64_t next_ = 0;
  Sums sums_;
};

CopyCheck::CopyCheck(const TrainState& state, const ProcessGroups& groups, int64_t start)
    : state_(state), groups_(groups), sound_(start) {
  cut_segments();
  find_parts();
}

// The cuts of all ranks laid over each other. Replicas of one width are cut alike.
void CopyCheck::cut_segments() {
  std::vector<const Parameter*> parameters;
  std::vector<int64_t> mine;  // parameter, first row, end
  for (const Weight& weight : state_.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      for (const Range& rows : held_rows(parameter)) {
        mine.insert(mine.end(), {std::ssize(parameters), rows.begin, rows.end});
      }
      parameters.push_back(&parameter);
    }
  }
  const bool alike = groups_.topology.uniform();
  std::vector<std::vector<Range>> held(parameters.size());
  for (const std::vector<int64_t>& rank : gather(alike ? *groups_.tensor : *groups_.world, std::move(mine))) {
    for (size_t i = 0; i + 2 < rank.size(); i += 3) {
      held[static_cast<size_t>(rank[i])].push_back({rank[i + 1], rank[i + 2]});
    }
  }
  for (size_t p = 0; p < parameters.size(); ++p) {
    std::set<int64_t> cuts;
    for (const Range& rows : held[p]) cuts.insert({rows.begin, rows.end});
    for (auto cut = cuts.begin(); cut != cuts.end() && std::next(cut) != cuts.end(); ++cut) {
      const auto holders =
          static_cast<int>(std::ranges::count_if(held[p], [=](const Range& rows) { return rows.contains(*cut); }));
      if (holders == 0) continue;
      segments_.push_back(
          {parameters[p], {*cut, *std::next(cut)}, holders * (alike ? groups_.topology.replicas() : 1)});
    }
  }
}

void CopyCheck::find_parts() {
  held_.assign(segments_.size(), false);
  std::map<const Parameter*, size_t> first;
  for (size_t s = segments_.size(); s-- > 0;) first[segments_[s].parameter] = s;
  for (const Weight& weight : state_.parameters().weights()) {
    std::vector<Part>& parts = parts_.emplace_back();
    for (const Parameter& parameter : weight.parameters) {
      for (const RowRun& run : parameter.runs) {
        for (size_t s = first[&parameter]; s < segments_.size() && segments_[s].parameter == &parameter; ++s) {
          const Range rows = intersect(segments_[s].rows, run.global);
          if (rows.empty()) continue;
          const int64_t stored = run.local + rows.begin - run.global.begin;
          parts.push_back(
              {s, {stored, stored + rows.size()}, (rows.begin - segments_[s].rows.begin) * parameter.cols()});
          held_[s] = true;
        }
      }
    }
  }
}

bool CopyCheck::has_masters() const {
  return state_.parameters().flat_values().dtype() != DType::kF32;
}

std::vector<CopyCheck::Source> CopyCheck::held() const {
  std::vector<Source> sources;
  const std::vector<Weight>& weights = state_.parameters().weights();
  for (size_t w = 0; w < weights.size(); ++w) {
    if (weights[w].rows == 0) continue;
    sources.push_back({static_cast<WeightId>(w), 0, weights[w].value.view({weights[w].rows, weights[w].cols})});
  }
  return sources;
}

std::vector<CopyCheck::Source> CopyCheck::owned(Owned which) const {
  std::vector<Source> sources;
  for (const AdamW::OwnState& own : state_.optimizer().own_states()) {
    const Weight& weight = state_.parameters().weight(own.weight);
    const Tensor values = which == Owned::kMasters
                              ? own.master
                              : state_.parameters().flat_values().rows(own.elements.begin, own.elements.end);
    sources.push_back({own.weight, (own.elements.begin - weight.offset) / weight.cols,
                       values.view({values.numel() / weight.cols, weight.cols})});
  }
  return sources;
}

CopyCheck::Sums CopyCheck::hash(const std::vector<Source>& sources, DType rounded, const Wanted& wanted) const {
  const Tensor& room = state_.block_hashes();
  Pass pass(state_.stream(), room, segments_);
  for (const Source& source : sources) {
    const Range stored{source.row, source.row + source.values.dim(0)};
    const int64_t cols = source.values.dim(1);
    std::vector<ops::HashedRows> runs;
    const auto launch = [&] {
      if (!runs.empty()) ops::add_block_hashes(state_.stream(), source.values, runs, room, rounded);
      runs.clear();
    };
    for (const Part& part : parts_[static_cast<size_t>(source.weight)]) {
      const Range rows = intersect(part.stored, stored);
      if (rows.empty() || !wanted(segments_[part.segment])) continue;
      if (!pass.fits(part.segment)) {
        launch();
        pass.flush();
      }
      const int64_t first = pass.place(part.segment) + part.first + (rows.begin - part.stored.begin) * cols;
      runs.push_back({{rows.begin - stored.begin, rows.end - stored.begin}, {first, cols, cols, 0}});
    }
    launch();
  }
  return pass.sums();
}

void CopyCheck::look() {
  state_.await_values();
  if (looks_.size() < kLooks) looks_.push_back({Sums(segments_.size()), Sums(segments_.size())});
  const auto copied = [](const Segment& segment) { return segment.holders > 1; };
  add(looks_.back().values, hash(held(), DType::kF32, copied));
}

void CopyCheck::look_at_masters() {
  if (!has_masters()) return;
  Look& look = looks_.back();
  const auto every = [](const Segment&) { return true; };
  add(look.rounded, hash(owned(Owned::kValues), DType::kF32, every));
  add(look.rounded, hash(owned(Owned::kMasters), DType::kBF16, every), -1);
}

CopyCheck::Compared CopyCheck::values_of(const Look& look) const {
  return {Kind::kValues, look.values, held_};
}
CopyCheck::Compared CopyCheck::rounded_of(const Look& look) const {
  return {Kind::kRounded, look.rounded, std::vector<bool>(segments_.size(), true)};
}

// Collective over the world.
std::vector<CopyCheck::Difference> CopyCheck::differences(const std::vector<Compared>& all) const {
  std::vector<int64_t> least;  // of each sum, and of its complement, whose least is that of the greatest
  for (const Compared& compared : all) {
    for (size_t s = 0; s < segments_.size(); ++s) {
      least.push_back(compared.mine[s] ? compared.sums[s] : kAbsent);
      least.push_back(compared.mine[s] ? ~compared.sums[s] : kAbsent);
    }
  }
  groups_.world->all_reduce(Stream(DeviceType::kCpu), view_of(least), ReduceOp::kMin);
  std::vector<Difference> found;
  for (size_t i = 0; i < least.size() / 2; ++i) {
    const int64_t low = least[2 * i], high = least[2 * i + 1];
    const bool zero_expected = all[i / segments_.size()].kind == Kind::kRounded;
    const bool differs = zero_expected ? low != 0 || high != ~int64_t{0} : low != kAbsent && low != ~high;
    if (differs) found.push_back({i / segments_.size(), i % segments_.size()});
  }
  return found;
}

void CopyCheck::compare(int64_t step) {
  Look total{Sums(segments_.size()), Sums(segments_.size())};
  for (const Look& look : looks_) {
    add(total.values, look.values);
    add(total.rounded, look.rounded);
  }
  if (!differences({values_of(total), rounded_of(total)}).empty()) refuse();
  sound_ = step;
  looks_.clear();
}

void CopyCheck::check(int64_t step) {
  if (step == sound_) return;
  look();
  look_at_masters();
  compare(step);
}

// By what differed first: a copy that went wrong may have spread since then. Collective over the world.
void CopyCheck::refuse() const {
  std::vector<Compared> history;
  for (const Look& look : looks_) {
    history.push_back(values_of(look));
    history.push_back(rounded_of(look));
  }
  std::vector<Difference> found = differences(history);
  const auto time_of = [&](const Difference& at) { return at.compared / 2; };
  std::erase_if(found, [&, first = time_of(found.at(0))](const Difference& at) { return time_of(at) != first; });
  std::string text = "copies of the state differ: ";
  for (size_t i = 0; i < std::min(found.size(), kNamed); ++i) {
    text += (i > 0 ? "; " : "") + describe(history[found[i].compared], found[i].segment);
  }
  if (found.size() > kNamed) text += format("; and {} more", found.size() - kNamed);
  throw Error(
      ErrorKind::kFault, text,
      format("the memory of that rank, or what brings it new weights, is at fault: test its machine, and {}",
             sound_ > 0 ? format("resume from a checkpoint of step {} or before, when all copies were equal", sound_)
                        : "start again"));
}

// "model.norm.weight on rank 2 differs from that on ranks 0, 1, 3", by the ranks of the job. Collective over the world.
std::string CopyCheck::describe(const Compared& compared, size_t s) const {
  std::map<int64_t, std::vector<size_t>> by_sum;
  const auto all = gather(*groups_.world, {compared.mine[s] ? 1 : 0, compared.sums[s]});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][0] != 0) {
      by_sum[all[rank][1]].push_back(static_cast<size_t>(groups_.world->job_rank(static_cast<int>(rank))));
    }
  }
  for (auto& side : by_sum) std::ranges::sort(side.second);
  const auto right = compared.kind == Kind::kRounded
                         ? by_sum.try_emplace(0).first
                         : std::ranges::max_element(by_sum, {}, [](const auto& side) {  // the first rank's of as many
                             return std::pair(side.second.size(), -static_cast<int64_t>(side.second.front()));
                           });
  std::vector<size_t> others;
  for (auto side = by_sum.begin(); side != by_sum.end(); ++side) {
    if (side != right) others.insert(others.end(), side->second.begin(), side->second.end());
  }
  std::ranges::sort(others);
  const std::string what = name_of(segments_[s]);
  if (compared.kind == Kind::kRounded) {
    return format("{} on {} is not what its master weights round to", what, list_first_ranks(others));
  }
  return format("{} on {} differs from that on {}", what, list_first_ranks(others), list_first_ranks(right->second));
}

// With its rows, if there are others.
std::string CopyCheck::name_of(const Segment& segment) {
  const Parameter& parameter = *segment.parameter;
  if (segment.rows.size() == parameter.rows()) return parameter.name;
  const int64_t width = parameter.transposed ? parameter.column_block : 1;
  return format("{} ({} {} to {})", parameter.name, parameter.transposed ? "columns" : "rows",
                segment.rows.begin * width, segment.rows.end * width - 1);
}

}  // namespace invar
