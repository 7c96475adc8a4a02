#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace invar {

// weight / Σ weights in fp64, added in numpy's order, so that every bit is the one that Megatron-LM computes with.
std::vector<double> normalised(std::span<const double> weights);

// Megatron's blending, the same to the bit: position i takes the next sample of the source that is furthest behind its
// weight, i.e. of the largest weight · max(i, 1) − samples taken so far, the first among equals. It takes 2.5 bytes for
// each position, and size · sources operations once.
class BlendOrder {
 public:
  // Positive weights, one per source, at most 32766; they are normalised here.
  BlendOrder(std::span<const double> weights, int64_t size);

  struct Pick {
    int32_t source;
    int64_t sample;  // how many times the source was taken before

    bool operator==(const Pick&) const = default;
  };
  int64_t size() const { return static_cast<int64_t>(sources_.size()); }
  Pick at(int64_t position) const;
  int64_t taken(int32_t source) const { return taken_[static_cast<size_t>(source)]; }  // in all positions

 private:
  std::vector<int64_t> taken_;
  size_t spacing_;
  std::vector<int16_t> sources_;  // of each position
  std::vector<int64_t> marks_;    // the counts of all sources at positions 0, spacing, 2 · spacing, ...
};

}  // namespace invar
