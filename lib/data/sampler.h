#pragma once

#include <cstdint>

#include "data/token_source.h"

namespace invar {

enum class SampleOrder : uint8_t {
  kSequential,  // 0, 1, 2, ..., and again from 0
  kShuffled,    // another permutation of all samples in every epoch
};

// Only the training split of a flat file is shuffled here: mock samples are random as they are, megatron carries its
// own shuffle, a blend shuffles its sources one by one, and an evaluation always reads the same samples from the first
// one on.
SampleOrder sample_order(const DataConfig& data, Split split);

// The order of the samples as a pure function, so that a run may stop, resume and change its layout at any step without
// a position to restore. global_position = step · global_batch_size + index within the global batch.
class Sampler {
 public:
  Sampler(SampleOrder order, int64_t samples, uint64_t seed);

  int64_t sample_at(int64_t global_position) const;

 private:
  SampleOrder order_;
  int64_t samples_;
  uint64_t seed_;
};

}  // namespace invar
