#include "ops/sample_sums.h"

#include <algorithm>

#include "core/error.h"
#include "ops/tree_sum.h"

namespace invar::ops {

void check_places(std::string_view op, std::span<const SamplePlace> places, int64_t samples) {
  INVAR_CHECK(std::ssize(places) == samples && samples <= kMostSamples, "{}: {} places of {} samples, at most {}", op,
              places.size(), samples, kMostSamples);
  for (size_t i = 0; i < places.size(); ++i) {
    const SamplePlace& place = places[i];
    INVAR_CHECK(0 <= place.joins && place.joins <= place.buffer && place.buffer < SumProgram::kMaxDepth,
                "{}: {} joins from buffer {} of {}", op, place.joins, place.buffer, SumProgram::kMaxDepth);
    if (i == 0) continue;
    const int last = places[i - 1].buffer - places[i - 1].joins;
    INVAR_CHECK(place.buffer == last + (place.clears ? 1 : 0), "{}: a sample {} buffer {} after one in buffer {}", op,
                place.clears ? "clears" : "adds to", place.buffer, last);
  }
}

int buffers_needed(std::span<const SamplePlace> places) {
  int needed = 0, lowest = SumProgram::kMaxDepth;  // of the sums that the samples have changed
  for (const SamplePlace& place : places) {
    if (place.clears) lowest = std::min(lowest, place.buffer);
    const int left = place.buffer - place.joins;
    if (left < lowest) needed = std::max(needed, std::min(lowest, place.buffer + 1));
    lowest = std::min(lowest, left);
  }
  return places.empty() ? 0 : std::max(needed, places.back().buffer - places.back().joins + 1);
}

void check_buffers(std::string_view op, std::span<const Tensor> buffers, int needed) {
  INVAR_CHECK(std::ssize(buffers) >= std::max(needed, 1) && buffers.size() <= SumProgram::kMaxDepth,
              "{}: {} buffers, {} are needed, at most {} taken", op, buffers.size(), needed, SumProgram::kMaxDepth);
}

}  // namespace invar::ops
