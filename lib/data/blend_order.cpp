#include "data/blend_order.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/error.h"

namespace invar {
namespace {

// Pairwise summation as numpy.sum does it: fewer than 8 numbers one by one, up to 128 in eight interleaved sums, more
// in two halves.
double numpy_sum(std::span<const double> values) {
  const size_t n = values.size();
  if (n > 128) {
    const size_t half = n / 2 / 8 * 8;
    return numpy_sum(values.first(half)) + numpy_sum(values.subspan(half));
  }
  double sum = 0.0;
  size_t next = 0;
  if (n >= 8) {
    std::array<double, 8> lanes{};
    for (; next + 8 <= n; next += 8) {
      for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[next + lane];
    }
    sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
  for (; next < n; ++next) sum += values[next];
  return sum;
}

// Between two marks lie 16 positions per source, so that the marks take half a byte for each position, and at least
// 1024.
size_t mark_spacing(size_t sources) {
  return 16 * std::max<size_t>(sources, 64);
}

}  // namespace

std::vector<double> normalised(std::span<const double> weights) {
  const double sum = numpy_sum(weights);
  std::vector<double> shares(weights.size());
  std::transform(weights.begin(), weights.end(), shares.begin(), [=](double weight) { return weight / sum; });
  return shares;
}

BlendOrder::BlendOrder(std::span<const double> weights, int64_t size)
    : taken_(weights.size()), spacing_(mark_spacing(weights.size())) {
  INVAR_CHECK(size >= 1 && !weights.empty() && weights.size() <= std::numeric_limits<int16_t>::max(),
              "{} positions of {} sources", size, weights.size());
  const std::vector<double> share = normalised(weights);
  sources_.resize(static_cast<size_t>(size));
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (i % spacing_ == 0) marks_.insert(marks_.end(), taken_.begin(), taken_.end());
    const auto position = static_cast<double>(std::max<size_t>(i, 1));
    const auto behind = [&](size_t d) { return share[d] * position - static_cast<double>(taken_[d]); };
    size_t best = 0;
    double furthest = behind(0);
    for (size_t d = 1; d < share.size(); ++d) {
      const double distance = behind(d);
      if (distance > furthest) {
        furthest = distance;
        best = d;
      }
    }
    sources_[i] = static_cast<int16_t>(best);
    ++taken_[best];
  }
}

BlendOrder::Pick BlendOrder::at(int64_t position) const {
  INVAR_CHECK(position >= 0 && position < size(), "position {} of {}", position, size());
  const auto i = static_cast<size_t>(position);
  const int16_t source = sources_[i];
  const size_t mark = i / spacing_;
  const auto first = sources_.begin() + static_cast<std::ptrdiff_t>(mark * spacing_);
  const int64_t before = marks_[mark * taken_.size() + static_cast<size_t>(source)];
  return {source, before + std::count(first, sources_.begin() + position, source)};
}

}  // namespace invar
