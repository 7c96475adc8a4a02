#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ops/block_hashes.h"
#include "train/train_state.h"

namespace invar {

// Whether ranks that hold the same rows of a tensor hold the same bits. Compared are, by hashes:
//   values                 the working weights, as the passes of every step have read them, among all ranks with a copy
//   values and masters     in bf16, as the last step's passes have read them, on the rank that owns a row: a working
//                          weight is its master, rounded
// Gradients, masters and moments have no copies: a row's are on its owner only.
//
// The owner sends new values after every update, which hides a difference from whoever looks later, so that each step's
// values are taken in before its update. Only compare() communicates.
class CopyCheck {
 public:
  // start: finished steps. Collective over the world. state and groups must outlive it.
  CopyCheck(const TrainState& state, const ProcessGroups& groups, int64_t start);

  // Takes in the values as they are, while no micro-batch runs. All ranks do it at the same points of a run.
  void look();
  // Right after look(), at the steps that are compared: takes in whether the values that this rank owns are what their
  // masters round to. Two more passes over them in bf16, none in fp32.
  void look_at_masters();
  // Compares what was taken in since the last call. step: finished ones.
  // Error{kFault}, on every rank, names tensors and ranks. Collective over the world.
  void compare(int64_t step);
  // Both, unless the copies of this step are compared already.
  void check(int64_t step);

 private:
  // Rows of a parameter, unit-major, that each rank holds all of or none.
  struct Segment {
    const Parameter* parameter = nullptr;
    Range rows;
    int holders = 0;  // ranks of the world
  };
  // Part of a segment that lies in one run of rows of a weight's storage, of those that this rank holds.
  struct Part {
    size_t segment = 0;
    Range stored;
    int64_t first = 0;  // element of the segment
  };
  // Rows of a weight's storage from `row` on: of the weight itself, or of the optimizer's state of it.
  struct Source {
    WeightId weight = 0;
    int64_t row = 0;
    Tensor values;
  };
  enum class Kind : uint8_t { kValues, kRounded };
  using Sums = std::vector<int64_t>;  // by segment
  using Wanted = std::function<bool(const Segment&)>;
  struct Compared {
    Kind kind;
    Sums sums;
    std::vector<bool> mine;  // by segment: whether this rank's sum is one of those to be compared
  };
  struct Look {
    Sums values;
    Sums rounded;  // of owned rows: values less what their masters round to, so that they are zero
  };
  struct Difference {
    size_t compared = 0;
    size_t segment = 0;
  };
  class Pass;

  void cut_segments();
  void find_parts();
  std::vector<Source> held() const;
  enum class Owned : bool { kValues, kMasters };
  std::vector<Source> owned(Owned which) const;
  Sums hash(const std::vector<Source>& sources, DType rounded, const Wanted& wanted) const;
  bool has_masters() const;
  Compared values_of(const Look& look) const;
  Compared rounded_of(const Look& look) const;
  std::vector<Difference> differences(const std::vector<Compared>& all) const;
  [[noreturn]] void refuse() const;
  std::string describe(const Compared& compared, size_t segment) const;
  static std::string name_of(const Segment& segment);

  const TrainState& state_;
  const ProcessGroups& groups_;
  int64_t sound_;  // steps after which all copies were equal
  std::vector<Segment> segments_;
  std::vector<bool> held_;                // by segment
  std::vector<std::vector<Part>> parts_;  // by weight
  std::vector<Look> looks_;               // since the last comparison, all beyond a number in one
};

}  // namespace invar
