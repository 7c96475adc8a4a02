#include "data/flat_tokens.h"

#include <array>
#include <cmath>
#include <utility>

#include "core/shown.h"

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
                format("{}: its header says {}, but data.token_dtype is {}", path, name_of(header.type), token_dtype),
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

// The type of a file without a header: what data.token_dtype says, or its sidecar.
TokenArray open_headless(InputFile file, const std::string& token_dtype, const std::optional<Sidecar>& sidecar,
                         int64_t vocab_size) {
  const std::string path = file.path();
  const std::string told = sidecar ? sidecar->dtype : "";
  if (!token_dtype.empty() && !told.empty() && told != token_dtype) {
    throw Error(ErrorKind::kConfig,
                format("{}: says {}, but data.token_dtype is {}", sidecar->path, shown(told), token_dtype),
                "leave data.token_dtype out: the .json beside the tokens decides");
  }
  const std::string& dtype = told.empty() ? token_dtype : told;
  if (dtype.empty()) {
    throw Error(ErrorKind::kConfig,
                format("data.token_dtype is missing: {} has no known header, and its type is never guessed", path),
                "set data.token_dtype: uint16 or uint32 (nanoGPT files are uint16)");
  }
  constexpr int64_t kLargestOfUint16 = 65536;
  if (told.empty() && dtype == "uint16" && vocab_size > kLargestOfUint16) {
    throw Error(ErrorKind::kConfig,
                format("data.token_dtype is uint16, which holds ids below {}, but model.vocab_size is {}: if {} is "
                       "uint32, each of its tokens would be read as two",
                       kLargestOfUint16, vocab_size, path),
                format("set data.token_dtype: uint32; if the file is uint16 indeed, say so in {}.json: "
                       "{{\"dtype\": \"uint16\"}}, as tools/tokenise does",
                       path));
  }
  for (const TokenType type : {TokenType::kU16, TokenType::kU32}) {
    if (dtype != name_of(type)) continue;
    return {std::move(file), 0, type, told.empty() ? "data.token_dtype" : sidecar->path, vocab_size};
  }
  throw Error(told.empty() ? ErrorKind::kConfig : ErrorKind::kData,
              format("{} is {}, must be uint16 or uint32",
                     told.empty() ? "data.token_dtype" : sidecar->path + ": dtype", shown(dtype)),
              "convert the file to one of the two");
}

TokenArray open_tokens(const DataConfig& data, const std::optional<Sidecar>& sidecar, int64_t vocab_size) {
  InputFile file(data.path, "check data.path");
  const LlmcHeader* header = find_llmc_header(file);
  TokenArray tokens = header != nullptr ? open_llmc(std::move(file), *header, data.token_dtype, vocab_size)
                                        : open_headless(std::move(file), data.token_dtype, sidecar, vocab_size);
  if (sidecar) check_sidecar(*sidecar, tokens, vocab_size);
  return tokens;
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
      sidecar_(read_sidecar(data.path)),
      tokens_(open_tokens(data, sidecar_, request.vocab_size)),
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

std::vector<InputPrint> FlatTokens::inputs() const {
  std::vector<InputPrint> inputs = {tokens_.print()};
  if (sidecar_) inputs.push_back(sidecar_->print);
  return inputs;
}

std::string FlatTokens::describe() const {
  return format("{}: {} tokens ({}); {} split is tokens [{}, {}), {} samples", tokens_.path(), tokens_.size(),
                name_of(tokens_.type()), name_of(split_), part_.begin, part_.end, samples_);
}

void FlatTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  tokens_.read(part_.begin + sample * sequence_length(), tokens);
}

}  // namespace invar
