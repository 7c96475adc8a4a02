#pragma once

#include <cstdint>
#include <vector>

#include "core/range.h"
#include "data/sampler.h"
#include "data/token_source.h"

namespace invar {

// One micro-batch on one rank; T = B·S flat tokens, sample-major. A label is the token that follows; a negative label
// does not count in the loss.
struct Batch {
  std::vector<int32_t> tokens;           // (T)
  std::vector<int32_t> labels;           // (T)
  std::vector<int32_t> document_starts;  // (T): where in its sample the token's document begins; empty: not asked for
};

// What the token that ends a document does. It belongs to the document that it ends; the next one begins after it, and
// so does the first one of each sample at its first token.
struct DocumentRules {
  int32_t eod_id = -1;         // −1: no token ends one
  bool eod_mask_loss = false;  // positions whose input is eod_id do not count
  bool reset_at_eod = false;   // fills document_starts
};

// Which part of the global batch: each data-parallel rank owns a contiguous range of samples and works through it in
// micro-batches, of which it must be a multiple.
struct BatchGeometry {
  int64_t global_batch = 0;  // samples
  int64_t micro_batch = 0;   // samples
  Range own;                 // samples of the global batch
  int64_t micro_step = 0;
  int64_t first_sample = 0;  // global position of the first sample of step 0; not 0 after a change of the batch size
};

// step counts from 0. Samples and their order within the global batch do not depend on how it is divided.
void load_micro_batch(const TokenSource& source, const Sampler& sampler, int64_t step, const BatchGeometry& geometry,
                      Batch& batch, const DocumentRules& documents = {});

}  // namespace invar
