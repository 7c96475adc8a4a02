#pragma once

#include <cstdint>
#include <vector>

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

// step counts from 0. Samples and their order within the global batch depend on neither micro_batch nor dp_size.
void load_micro_batch(const TokenSource& source, const Sampler& sampler, int64_t step, const BatchGeometry& geometry,
                      Batch& batch, const DocumentRules& documents = {});

}  // namespace invar
