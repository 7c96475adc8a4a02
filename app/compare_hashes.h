#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace invar::app {

// What differs of one kind (weights, exp_avg, ...) of two runs' states at a step.
struct KindDifference {
  std::string kind;
  int64_t tensors = 0;           // of other hashes, or on one side only
  std::string first;             // of them, in the order of A; empty where a run's state_hashes.jsonl lacks the step
  std::optional<int64_t> block;  // first of the tensor's that differs, where both runs have the hashes of blocks
  std::vector<int64_t> shape;    // of the tensor, with a block
};

struct HashDifference {
  int64_t steps = 0;  // with hashes on both sides; none: nothing is compared
  int64_t equal = 0;  // of them
  std::optional<int64_t> first_differing;
  std::vector<KindDifference> kinds;  // at that step; none if loss or gradient norm alone differ

  bool all_equal() const { return steps > 0 && steps == equal; }
};

// The state hashes of two metrics.jsonl, and of the files beside them what names tensor and block. Of two lines for a
// step the later one counts. Nothing if one of them has no hashes at all. Error{kData} for files that are not a run's.
std::optional<HashDifference> compare_hashes(const std::filesystem::path& metrics_a,
                                             const std::filesystem::path& metrics_b);

}  // namespace invar::app
