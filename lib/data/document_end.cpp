#include "data/document_end.h"

#include <algorithm>

#include "config/document_end.h"
#include "config/refuse.h"
#include "core/integer.h"
#include "data/megatron_tokens.h"
#include "data/sidecar.h"

namespace invar {
namespace {

bool wants_documents(const DataConfig& data) {
  return data.reset_at_eod || data.eod_mask_loss;
}

// The token that the sidecars of the run's files name.
std::optional<DocumentEnd> files_document_end(const DataConfig& data) {
  const std::vector<std::string> alone = {data.path};
  std::optional<DocumentEnd> found;
  if (data.kind == DataKind::kMock) return found;
  for (const std::string& path : data.blend.empty() ? alone : data.blend.paths) {
    const auto sidecar = read_sidecar(data.kind == DataKind::kMegatron ? megatron_prefix(path) + ".bin" : path);
    if (!sidecar || !sidecar->eod_id) continue;
    if (found && found->id != *sidecar->eod_id) {
      throw Error(ErrorKind::kConfig,
                  format("data.blend: documents end with token {} as {} says, but with {} as {} says", found->id,
                         found->source, *sidecar->eod_id, sidecar->path),
                  "blend files of one tokenizer, or set data.reset_at_eod and data.eod_mask_loss to false");
    }
    found = DocumentEnd{*sidecar->eod_id, sidecar->path};
  }
  return found;
}

}  // namespace

void settle_eod_id(Config& config) {
  DataConfig& data = config.data;
  if (!wants_documents(data)) return;
  const std::string asked = data.reset_at_eod ? "data.reset_at_eod" : "data.eod_mask_loss";
  std::optional<DocumentEnd> found = files_document_end(data);
  if (data.eod_id >= 0) {
    if (!found || found->id == data.eod_id) return;
    refuse(
        config, {"data.eod_id"},
        format("data.eod_id = {}, but {} says that documents end with token {}", data.eod_id, found->source, found->id),
        "leave data.eod_id out: auto takes it from there");
  }
  if (!found) found = model_document_end(config.model);
  if (!found) {
    refuse(config, {asked},
           format("{} needs data.eod_id, the token that ends a document: neither the token file nor the model says it",
                  asked),
           "set data.eod_id; tools/tokenise prints it, and writes it to a .json file beside the tokens");
  }
  if (found->id < 0 || found->id >= config.model.vocab_size) {
    refuse(config, {asked},
           format("documents end with token {} as {} says, which is no token of model.vocab_size = {}", found->id,
                  found->source, config.model.vocab_size),
           "set data.eod_id, or use the tokenizer of the model");
  }
  data.eod_id = found->id;
}

std::string warn_of_no_document_end(const DataConfig& data, const TokenSource& source, const Sampler& sampler,
                                    int64_t first, int64_t count) {
  constexpr int64_t kTokens = 1'000'000;
  if (!wants_documents(data)) return "";
  const int64_t samples = std::min(count, ceil_div(kTokens, source.sequence_length()));
  std::vector<int32_t> tokens(static_cast<size_t>(source.sequence_length()) + 1);
  for (int64_t i = 0; i < samples; ++i) {
    source.read(sampler.sample_at(first + i), tokens);
    if (std::ranges::find(tokens, static_cast<int32_t>(data.eod_id)) != tokens.end()) return "";
  }
  if (samples <= 0) return "";
  return format(
      "no document ends (data.eod_id {}) in the first {} tokens that this run reads: data.reset_at_eod and "
      "data.eod_mask_loss may have no effect. Does the tokenizer end documents with another token?",
      data.eod_id, samples * source.sequence_length());
}

}  // namespace invar
