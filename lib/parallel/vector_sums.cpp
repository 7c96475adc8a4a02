#include "parallel/vector_sums.h"

#include <numeric>
#include <utility>

#include "core/integer.h"
#include "device/device.h"
#include "ops/elementwise.h"

namespace invar {

void VectorSums::begin(const SumContext& ctx) {
  const auto& [stream, region, scratch, activation, sequence_length] = ctx;
  if (region_ != &region || tokens_ != region.tokens() || sequence_length_ != sequence_length) {
    lay_out(region, sequence_length);
  }
  if (own_.empty()) return;
  terms_ = scratch.allocate("terms of vectors", DType::kF32, {begins_.back()});
  device_rows_ = scratch.allocate("rows of terms", DType::kI64, {rows_.packed_size()});
  copy_across(stream, view_of(packed_rows_), device_rows_);
  ops::zero(stream, part(static_cast<size_t>(region.group().rank())));
  ops::zero(stream, part(begins_.size() - 2));
}

Tensor VectorSums::terms(WeightId id) const {
  const Weight& weight = table_.weight(id);
  const auto found = own_.find(id);
  INVAR_CHECK(terms_.defined() && found != own_.end(), "terms of '{}' outside of a micro-batch", weight.name);
  const auto& [first, units, rows] = found->second;
  const Tensor flat = terms_.rows(first, first + units * rows * weight.rows);
  return weight.vector->over == VectorSum::Over::kHeads ? flat.view({units, rows, weight.rows})
                                                        : flat.view({units, weight.rows});
}

void VectorSums::finish(const Stream& stream, std::span<const ops::SamplePlace> places) {
  if (own_.empty()) return;
  Communicator& group = region_->group();
  const auto ranks = static_cast<size_t>(group.size());
  if (const Tensor all = terms_.rows(0, begins_[ranks]); !all.empty()) {
    std::vector<int64_t> counts;
    for (size_t r = 0; r < ranks; ++r) counts.push_back(begins_[r + 1] - begins_[r]);
    group.all_gather(stream, part(static_cast<size_t>(group.rank())), all, counts);
  }
  std::vector<Tensor> buffers;
  for (int buffer = 0; buffer < table_.gradient_buffers(); ++buffer) {
    buffers.push_back(table_.gradients(buffer, {0, table_.flat_size()}));
  }
  ops::add_term_sums(stream, rows_, device_rows_, terms_, {{places.begin(), places.end()}, std::move(buffers)});
  terms_ = Tensor();
  device_rows_ = Tensor();
}

VectorSums::Units VectorSums::units_of(const VectorSum& sum) const {
  Units units;
  if (sum.over == VectorSum::Over::kSamples) {
    units.counts = {samples()};
  } else if (sum.over == VectorSum::Over::kTokens) {
    const int64_t block = region_->token_block();
    INVAR_CHECK(block > 0 && sequence_length_ % block == 0, "samples of {} tokens in blocks of {}", sequence_length_,
                block);
    for (const Range& slice : region_->slices()) units.counts.push_back(slice.size() / block);
    units.per_sample = sequence_length_ / block;
  } else {
    units.counts = sum.counted;
    units.rows = samples();
    units.per_sample = std::reduce(units.counts.begin(), units.counts.end());
    INVAR_CHECK(std::ssize(units.counts) == region_->group().size(), "heads of {} ranks in group '{}' of {}",
                units.counts.size(), region_->group().name(), region_->group().size());
  }
  return units;
}

void VectorSums::lay_out(const TensorRegion& region, int64_t sequence_length) {
  INVAR_CHECK(region.tokens() % sequence_length == 0, "{} tokens in samples of {}", region.tokens(), sequence_length);
  region_ = &region;
  tokens_ = region.tokens();
  sequence_length_ = sequence_length;
  // Once for the sizes of parts, then where they begin.
  const std::vector<int64_t> sizes = place_all(std::vector<int64_t>(static_cast<size_t>(region.group().size()) + 1));
  begins_.assign(1, 0);
  for (const int64_t size : sizes) begins_.push_back(begins_.back() + size);
  place_all({begins_.begin(), begins_.end() - 1});
  packed_rows_ = rows_.packed();
}

// next: the next free element of each part. Returns what it is afterwards.
std::vector<int64_t> VectorSums::place_all(std::vector<int64_t> next) {
  own_.clear();
  rows_ = ops::TermTable(samples());
  for (WeightId id = 0; id < static_cast<WeightId>(table_.weights().size()); ++id) {
    if (table_.weight(id).vector) place_vector(id, next);
  }
  return next;
}

void VectorSums::place_vector(WeightId id, std::vector<int64_t>& next) {
  const Weight& weight = table_.weight(id);
  const Units units = units_of(*weight.vector);
  const bool heads = weight.vector->over == VectorSum::Over::kHeads;
  const int64_t unit = units.rows * weight.rows;
  const auto take = [&](size_t part, int64_t count) {  // aligned as tensors are
    return std::exchange(next[part], next[part] + round_up(count * unit, ParameterTable::kAlignment));
  };
  const size_t local = next.size() - 1;
  Own own{0, 0, units.rows};
  std::vector<int64_t> firsts;  // of units
  for (size_t r = 0; r < units.counts.size(); ++r) {
    const size_t part = units.counts.size() == 1 ? local : r;
    const int64_t first = take(part, units.counts[r]);
    for (int64_t i = 0; i < units.counts[r]; ++i) firsts.push_back(first + i * unit);
    if (part == local || std::cmp_equal(r, region_->group().rank())) own = {first, units.counts[r], units.rows};
  }
  if (heads && own.units != weight.vector->held) {
    INVAR_CHECK(own.units == 0, "'{}': {} of {} heads are counted", weight.name, own.units, weight.vector->held);
    own = {take(local, weight.vector->held), weight.vector->held, units.rows};  // copies, which nobody adds
  }
  own_[id] = own;
  std::vector<int64_t> rows;
  for (int64_t sample = 0; sample < samples(); ++sample) {
    for (int64_t i = 0; i < units.per_sample; ++i) {
      const int64_t skipped = heads ? 0 : sample * units.per_sample;
      rows.push_back(firsts[static_cast<size_t>(skipped + i)] + (heads ? sample * weight.rows : 0));
    }
  }
  rows_.add(weight.rows, weight.offset, rows);
}

}  // namespace invar
