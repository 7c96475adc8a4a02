#include "data/token_source.h"

#include "core/error.h"
#include "data/blended_tokens.h"
#include "data/flat_tokens.h"
#include "data/megatron_tokens.h"
#include "data/mock_tokens.h"

namespace invar {

std::string_view name_of(Split split) {
  return split == Split::kTrain ? "train" : "validation";
}

void TokenSource::read(int64_t sample, std::span<int32_t> tokens) const {
  INVAR_CHECK(sample >= 0 && sample < samples(), "sample {} of {}", sample, samples());
  INVAR_CHECK(std::ssize(tokens) == sequence_length_ + 1, "{} tokens for S = {}", tokens.size(), sequence_length_);
  fill(sample, tokens);
}

std::unique_ptr<TokenSource> make_token_source(const DataConfig& data, const TokenRequest& request) {
  INVAR_CHECK(request.sequence_length > 0 && request.vocab_size > 0, "S = {}, V = {}", request.sequence_length,
              request.vocab_size);
  if (!data.blend.empty()) return std::make_unique<BlendedTokens>(data, request);
  if (data.kind != DataKind::kMock && data.path.empty()) {
    throw Error(ErrorKind::kConfig, "data.path is missing: kinds tokens and megatron read files",
                "tools/tokenise makes them from text");
  }
  switch (data.kind) {
    case DataKind::kMock:
      return std::make_unique<MockTokens>(request);
    case DataKind::kTokens:
      return std::make_unique<FlatTokens>(data, request);
    case DataKind::kMegatron:
      return std::make_unique<MegatronTokens>(data, request);
  }
  return nullptr;
}

}  // namespace invar
