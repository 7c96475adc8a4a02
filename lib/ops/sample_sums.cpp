#include "ops/sample_sums.h"

#include <algorithm>

#include "core/error.h"
#include "ops/tree_sum.h"

namespace invar::ops {

int buffers_needed(std::span<const SamplePlace> places) {
  if (places.empty()) return 0;
  const int begun_before = places.front().buffer + (places.front().clears ? 0 : 1);
  return std::max(begun_before, places.back().buffer - places.back().joins + 1);
}

void check_sums(std::string_view op, const SampleSums& sums, int64_t samples) {
  const std::vector<SamplePlace>& places = sums.places;
  INVAR_CHECK(std::ssize(places) == samples && 0 < samples && samples <= kMostSamples,
              "{}: {} places of {} samples, at most {}", op, places.size(), samples, kMostSamples);
  for (size_t i = 0; i < places.size(); ++i) {
    const SamplePlace& place = places[i];
    INVAR_CHECK(0 <= place.joins && place.joins <= place.buffer && place.buffer < SumProgram::kMaxDepth,
                "{}: {} joins from buffer {} of {}", op, place.joins, place.buffer, SumProgram::kMaxDepth);
    if (i == 0) continue;
    const int last = places[i - 1].buffer - places[i - 1].joins;
    INVAR_CHECK(place.buffer == last + (place.clears ? 1 : 0), "{}: a sample {} buffer {} after one in buffer {}", op,
                place.clears ? "clears" : "adds to", place.buffer, last);
  }
  const int needed = buffers_needed(places);
  INVAR_CHECK(needed <= std::ssize(sums.buffers) && std::ssize(sums.buffers) <= SumProgram::kMaxDepth,
              "{}: {} buffers, {} are needed, at most {} taken", op, sums.buffers.size(), needed,
              SumProgram::kMaxDepth);
}

}  // namespace invar::ops
