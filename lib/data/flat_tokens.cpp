#include "data/flat_tokens.h"

#include <array>
#include <cmath>
#include <utility>

namespace invar {
namespace {

// Files of github.com/karpathy/llm.c begin with 256 int32: magic, version, token count, zeros.
struct LlmcHeader {
  int32_t magic;
  int32_t version;
  TokenType type;
};
constexpr std::array kLlmcHeaders = {LlmcHeader{20240520, 1, TokenType::kU16},
                                     LlmcHeader{20240801, 7, TokenType::kU32}};
constexpr int64_t kLlmcHeaderBytes = 256 * 4;

const LlmcHeader* find_llmc_header(const InputFile& file) {
  if (file.size() < 4) return nullptr;
  for (const LlmcHeader& header : kLlmcHeaders) {
    if (file.value<int32_t>(0) == header.magic) return &header;
  }
  return nullptr;
}

TokenArray open_llmc(InputFile file, const LlmcHeader& header, const std::string& token_dtype, int64_t vocab_size) {
  const std::string path = file.path();
  if (file.size() < kLlmcHeaderBytes) {
    throw Error(ErrorKind::kData, format("token file {}: an llm.c header has {} bytes, the file only {}", path,
                                         kLlmcHeaderBytes, file.size()));
  }
  const auto version = file.value<int32_t>(4);
  const int64_t count = file.value<int32_t>(8);
  if (version != header.version) {
    throw Error(ErrorKind::kData, format("token file {}: llm.c magic {} with version {}; only version {} is known",
                                         path, header.magic, version, header.version));
  }
  if (!token_dtype.empty() && token_dtype != name_of(header.type)) {
    throw Error(ErrorKind::kConfig,
                format("data.token_dtype is {}, but the header of {} says {}", token_dtype, path, name_of(header.type)),
                "leave data.token_dtype out: the header decides");
  }
  const int64_t bytes = kLlmcHeaderBytes + count * size_of(header.type);
  if (file.size() != bytes) {
    throw Error(ErrorKind::kData,
                format("token file {}: the header says {} {} tokens, which makes {} bytes, but the file has {}", path,
                       count, name_of(header.type), bytes, file.size()),
                "the file is truncated or was not finished");
  }
  return {std::move(file), kLlmcHeaderBytes, header.type, "its header", vocab_size};
}

TokenArray open_tokens(const DataConfig& data, int64_t vocab_size) {
  InputFile file(data.path, "check data.path");
  if (const LlmcHeader* header = find_llmc_header(file)) {
    return open_llmc(std::move(file), *header, data.token_dtype, vocab_size);
  }
  for (const TokenType type : {TokenType::kU16, TokenType::kU32}) {
    if (data.token_dtype == name_of(type)) return {std::move(file), 0, type, "data.token_dtype", vocab_size};
  }
  if (data.token_dtype.empty()) {
    throw Error(ErrorKind::kConfig,
                format("data.token_dtype is missing: {} has no known header, and its type is never guessed", data.path),
                "set data.token_dtype: uint16 or uint32 (nanoGPT files are uint16)");
  }
  throw Error(ErrorKind::kConfig, format("data.token_dtype is {}, must be uint16 or uint32", data.token_dtype));
}

Range tokens_of_split(const DataConfig& data, Split split, int64_t tokens) {
  const double fraction = data.validation_fraction;
  INVAR_CHECK(fraction >= 0.0 && fraction < 1.0, "data.validation_fraction = {}", fraction);
  if (split == Split::kValidation && fraction == 0.0) {
    throw Error(ErrorKind::kConfig, "an evaluation is asked for, but data.validation_fraction is 0",
                "set data.validation_fraction, e.g. 0.01, or train.eval_every: 0");
  }
  const int64_t boundary = tokens - static_cast<int64_t>(std::floor(static_cast<double>(tokens) * fraction));
  return split == Split::kTrain ? Range{0, boundary} : Range{boundary, tokens};
}

}  // namespace

FlatTokens::FlatTokens(const DataConfig& data, const TokenRequest& request)
    : TokenSource(request.sequence_length),
      tokens_(open_tokens(data, request.vocab_size)),
      split_(request.split),
      part_(tokens_of_split(data, request.split, tokens_.size())),
      samples_((part_.size() - 1) / request.sequence_length) {
  if (samples_ >= 1) return;
  throw Error(ErrorKind::kData,
              format("token file {}: the {} split has {} of {} tokens (data.validation_fraction = {}), but one sample "
                     "needs train.sequence_length + 1 = {}",
                     tokens_.path(), name_of(split_), part_.size(), tokens_.size(), data.validation_fraction,
                     request.sequence_length + 1),
              split_ == Split::kTrain ? "use more text, a shorter train.sequence_length or a smaller "
                                        "data.validation_fraction"
                                      : "raise data.validation_fraction, or use more text");
}

std::string FlatTokens::describe() const {
  return format("{}: {} tokens ({}); {} split is tokens [{}, {}), {} samples", tokens_.path(), tokens_.size(),
                name_of(tokens_.type()), name_of(split_), part_.begin, part_.end, samples_);
}

void FlatTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  tokens_.read(part_.begin + sample * sequence_length(), tokens);
}

}  // namespace invar
