#pragma once

#include <cstdint>
#include <vector>

#include "data/sampler.h"
#include "data/token_source.h"

namespace invar {

// One micro-batch on one rank; T = B·S flat tokens, sample-major. A label is the token that follows; a negative label
// does not count in the loss.
struct Batch {
  std::vector<int32_t> tokens;  // (T)
  std::vector<int32_t> labels;  // (T)
};

// Which part of the global batch: each data-parallel rank owns a contiguous range of global_batch / dp_size samples and
// works through it in micro-batches. global_batch must be a multiple of micro_batch · dp_size.
struct BatchGeometry {
  int64_t global_batch = 0;  // samples
  int64_t micro_batch = 0;   // samples
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t micro_step = 0;
  int64_t first_sample = 0;  // global position of the first sample of step 0; not 0 after a change of the batch size
};

// step counts from 0. Positions whose input is masked_input do not count; −1 masks none. Samples and their order within
// the global batch depend on neither micro_batch nor dp_size.
void load_micro_batch(const TokenSource& source, const Sampler& sampler, int64_t step, const BatchGeometry& geometry,
                      Batch& batch, int32_t masked_input = -1);

}  // namespace invar
