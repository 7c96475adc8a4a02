#include "data/megatron_tokens.h"

#include <utility>

#include "data/megatron_split.h"

namespace invar {
namespace {

TokenArray open_tokens(const std::string& path, const MegatronIndex& index, int64_t vocab_size) {
  MappedFile file(path, "check data.path");
  const int64_t bytes = index.tokens() * size_of(index.type());
  if (file.size() != bytes) {
    throw Error(ErrorKind::kData,
                format("token file {}: the index says {} {} tokens, which makes {} bytes, but the file has {}", path,
                       index.tokens(), name_of(index.type()), bytes, file.size()),
                "the .bin file is truncated, or belongs to another .idx");
  }
  return {std::move(file), 0, index.type(), vocab_size};
}

}  // namespace

MegatronTokens::MegatronTokens(const DataConfig& data, const TokenRequest& request)
    : TokenSource(request.sequence_length),
      split_(request.split),
      index_(data.path + ".idx"),
      tokens_(open_tokens(data.path + ".bin", index_, request.vocab_size)),
      sequences_(split_sequences(data.split, request.split == Split::kTrain ? 0 : 1, index_.sequences())),
      order_(index_.lengths(sequences_), request.sequence_length, request.samples_wanted, request.seed) {}

std::string MegatronTokens::describe() const {
  return format("{}: {} tokens ({}) in {} documents; {} split is sequences [{}, {}), {} samples", tokens_.path(),
                tokens_.size(), name_of(tokens_.type()), index_.documents(), name_of(split_), sequences_.begin,
                sequences_.end, samples());
}

void MegatronTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  for (const auto& piece : order_.pieces(sample)) {
    const auto count = static_cast<size_t>(piece.count);
    tokens_.read(index_.first_token(sequences_.begin + piece.sequence) + piece.offset, tokens.first(count));
    tokens = tokens.subspan(count);
  }
  INVAR_CHECK(tokens.empty(), "sample {} lacks {} tokens", sample, tokens.size());
}

}  // namespace invar
