#include "data/blended_tokens.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace invar {
namespace {

// Megatron's mid_level_dataset_surplus.
constexpr double kSurplus = 0.005;

int64_t scaled_up(int64_t count, double factor) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(count) * factor));
}

}  // namespace

BlendedTokens::BlendedTokens(const DataConfig& data, const TokenRequest& request)
    : TokenSource(request.sequence_length) {
  INVAR_CHECK(data.kind != DataKind::kMock, "a blend of mock tokens");
  INVAR_CHECK(request.samples_wanted >= 1, "samples_wanted = {}", request.samples_wanted);
  const std::vector<double> weights = data.blend.weights.empty() ? blend_by_size(data, request, data.blend)
                                                                 : blend_by_weight(data, request, data.blend);
  if (request.once) order_.emplace(weights, positions_without_repetition());
}

// Source d as if it were data.path, `samples` of it wanted.
BlendedTokens::Source BlendedTokens::open(const DataConfig& data, TokenRequest request, const Blend& blend, size_t d,
                                          int64_t samples) {
  DataConfig alone = data;
  alone.blend = {};
  alone.path = blend.paths[d];
  request.samples_wanted = samples;
  try {
    auto tokens = make_token_source(alone, request);
    const Sampler sampler(sample_order(alone, request.split), tokens->samples(), request.seed);
    return {std::move(tokens), sampler};
  } catch (const Error& error) {
    const Error named = error.in(format("source {} of data.blend", d + 1));
    if (error.kind() == ErrorKind::kFault) throw named;
    std::string hint = error.hint();  // of a source alone
    constexpr std::string_view kAlone = "data.path";
    for (size_t at; (at = hint.find(kAlone)) != std::string::npos;) hint.replace(at, kAlone.size(), "data.blend");
    throw Error(error.kind(), named.what(), hint);
  }
}

std::vector<double> BlendedTokens::blend_by_weight(const DataConfig& data, const TokenRequest& request,
                                                   const Blend& blend) {
  std::vector<double> shares = normalised(blend.weights);
  int64_t size = 0;
  for (const double share : shares) size += scaled_up(request.samples_wanted, share);
  order_.emplace(shares, size);
  for (size_t d = 0; d < shares.size(); ++d) {
    const int64_t target = scaled_up(request.samples_wanted, shares[d]);
    const int64_t taken = order_->taken(static_cast<int32_t>(d));
    Source source = open(data, request, blend, d, scaled_up(target, 1 + kSurplus));
    // Few samples of many sources: rounding each target up can outgrow the surplus.
    const bool too_short = data.kind == DataKind::kMegatron && !request.once && source.tokens->samples() < taken;
    sources_.push_back(too_short ? open(data, request, blend, d, taken) : std::move(source));
  }
  return shares;
}

std::vector<double> BlendedTokens::blend_by_size(const DataConfig& data, const TokenRequest& request,
                                                 const Blend& blend) {
  const int64_t wanted_of_each = blend.paths.size() == 1 ? request.samples_wanted : 0;  // 0: one pass
  std::vector<double> sizes;
  int64_t all = 0;
  for (size_t d = 0; d < blend.paths.size(); ++d) {
    sources_.push_back(open(data, request, blend, d, wanted_of_each));
    const int64_t size = sources_.back().tokens->samples();
    sizes.push_back(static_cast<double>(size));
    all += size;
  }
  const bool ends = data.kind == DataKind::kMegatron || request.once;
  order_.emplace(sizes, ends ? std::min(request.samples_wanted, all) : request.samples_wanted);
  return sizes;
}

// The positions before the first one that would read a sample again.
int64_t BlendedTokens::positions_without_repetition() const {
  int64_t position = 0;
  for (; position < order_->size(); ++position) {
    const auto [source, sample] = order_->at(position);
    if (sample >= sources_[static_cast<size_t>(source)].tokens->samples()) break;
  }
  return position;
}

template <class T, class Lists>
std::vector<T> BlendedTokens::gather(const Lists& lists) const {
  std::vector<T> all;
  for (const Source& source : sources_) {
    for (T& item : lists(*source.tokens)) all.push_back(std::move(item));
  }
  return all;
}

std::string BlendedTokens::describe() const {
  std::string text = format("blend of {} sources, {} samples", sources_.size(), samples());
  const size_t shown = std::min<size_t>(sources_.size(), 16);
  for (size_t d = 0; d < shown; ++d) {
    text += format("; {} samples of {}", order_->taken(static_cast<int32_t>(d)), sources_[d].tokens->describe());
  }
  if (shown < sources_.size()) text += format("; and {} more", sources_.size() - shown);
  return text;
}

std::vector<std::string> BlendedTokens::warnings() const {
  return gather<std::string>([](const TokenSource& source) { return source.warnings(); });
}

std::vector<InputPrint> BlendedTokens::inputs() const {
  return gather<InputPrint>([](const TokenSource& source) { return source.inputs(); });
}

void BlendedTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  const auto [source, position] = order_->at(sample);
  const Source& from = sources_[static_cast<size_t>(source)];
  from.tokens->read(from.sampler.sample_at(position), tokens);
}

}  // namespace invar
