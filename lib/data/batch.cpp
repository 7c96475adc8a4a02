#include "data/batch.h"

#include <algorithm>

#include "core/error.h"

namespace invar {

void load_micro_batch(const TokenSource& source, const Sampler& sampler, int64_t step, const BatchGeometry& geometry,
                      Batch& batch, int32_t masked_input) {
  const auto& [global_batch, micro_batch, dp_rank, dp_size, micro_step, first_sample] = geometry;
  INVAR_CHECK(micro_batch > 0 && dp_size > 0 && global_batch % (micro_batch * dp_size) == 0,
              "global batch {} with micro-batch {} and {} data-parallel ranks", global_batch, micro_batch, dp_size);
  const int64_t per_rank = global_batch / dp_size;
  INVAR_CHECK(dp_rank >= 0 && dp_rank < dp_size && micro_step >= 0 && micro_step < per_rank / micro_batch,
              "data-parallel rank {} of {}, micro-step {}", dp_rank, dp_size, micro_step);
  const int64_t first = first_sample + step * global_batch + dp_rank * per_rank + micro_step * micro_batch;

  const int64_t sequence_length = source.sequence_length();
  std::vector<int32_t> sample(static_cast<size_t>(sequence_length) + 1);
  batch.tokens.resize(static_cast<size_t>(micro_batch * sequence_length));
  batch.labels.resize(batch.tokens.size());
  for (int64_t b = 0; b < micro_batch; ++b) {
    source.read(sampler.sample_at(first + b), sample);
    std::copy(sample.begin(), sample.end() - 1, batch.tokens.begin() + b * sequence_length);
    std::transform(sample.begin(), sample.end() - 1, sample.begin() + 1, batch.labels.begin() + b * sequence_length,
                   [=](int32_t input, int32_t next) { return input == masked_input ? -1 : next; });
  }
}

}  // namespace invar
