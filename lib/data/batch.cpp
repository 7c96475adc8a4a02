#include "data/batch.h"

#include <algorithm>
#include <span>

#include "core/error.h"

namespace invar {
namespace {

// tokens, starts: of one sample.
void find_document_starts(std::span<const int32_t> tokens, int32_t eod_id, std::span<int32_t> starts) {
  int32_t start = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    starts[i] = start;
    if (tokens[i] == eod_id) start = static_cast<int32_t>(i) + 1;
  }
}

}  // namespace

void load_micro_batch(const TokenSource& source, const Sampler& sampler, int64_t step, const BatchGeometry& geometry,
                      Batch& batch, const DocumentRules& documents) {
  const auto& [global_batch, micro_batch, own, micro_step, first_sample] = geometry;
  INVAR_CHECK(micro_batch > 0 && own.begin >= 0 && own.end <= global_batch && own.size() % micro_batch == 0,
              "samples [{}, {}) of {} in micro-batches of {}", own.begin, own.end, global_batch, micro_batch);
  INVAR_CHECK(micro_step >= 0 && micro_step < own.size() / micro_batch, "micro-step {} of {}", micro_step,
              own.size() / micro_batch);
  INVAR_CHECK(documents.eod_id >= 0 || !(documents.reset_at_eod || documents.eod_mask_loss), "no eod_id for documents");
  const int64_t first = first_sample + step * global_batch + own.begin + micro_step * micro_batch;

  const int64_t sequence_length = source.sequence_length();
  std::vector<int32_t> sample(static_cast<size_t>(sequence_length) + 1);
  batch.tokens.resize(static_cast<size_t>(micro_batch * sequence_length));
  batch.labels.resize(batch.tokens.size());
  batch.document_starts.resize(documents.reset_at_eod ? batch.tokens.size() : 0);
  const int32_t masked_input = documents.eod_mask_loss ? documents.eod_id : -1;
  for (int64_t b = 0; b < micro_batch; ++b) {
    source.read(sampler.sample_at(first + b), sample);
    std::copy(sample.begin(), sample.end() - 1, batch.tokens.begin() + b * sequence_length);
    std::transform(sample.begin(), sample.end() - 1, sample.begin() + 1, batch.labels.begin() + b * sequence_length,
                   [=](int32_t input, int32_t next) { return input == masked_input ? -1 : next; });
    if (!documents.reset_at_eod) continue;
    const auto starts = std::span(batch.document_starts).subspan(static_cast<size_t>(b * sequence_length));
    find_document_starts(std::span(sample).first(sample.size() - 1), documents.eod_id, starts);
  }
}

}  // namespace invar
