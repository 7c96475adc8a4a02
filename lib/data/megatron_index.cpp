#include "data/megatron_index.h"

#include <cstring>
#include <optional>
#include <string_view>

namespace invar {
namespace {

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr int64_t kHeaderBytes = 34;

[[noreturn]] void fail(const std::string& path, const std::string& what, const std::string& hint = "") {
  throw Error(ErrorKind::kData, format("Megatron index {}: {}", path, what), hint);
}

std::optional<TokenType> token_type_of(int code) {
  switch (code) {
    case 1:
      return TokenType::kU8;
    case 2:
      return TokenType::kI8;
    case 3:
      return TokenType::kI16;
    case 4:
      return TokenType::kI32;
    case 5:
      return TokenType::kI64;
    case 8:
      return TokenType::kU16;
    default:
      return std::nullopt;  // 6 and 7 are float64 and float32
  }
}

}  // namespace

MegatronIndex::MegatronIndex(const std::string& path) : file_(path, "check data.path") {
  read_header();
  check_sequences();
  check_documents();
}

void MegatronIndex::read_header() {
  const std::string& path = file_.path();
  if (file_.size() < kHeaderBytes || std::memcmp(file_.data(), kMagic.data(), kMagic.size()) != 0) {
    fail(path, "does not begin with MMIDIDX", "data.path must be the prefix of a Megatron .bin and .idx pair");
  }
  const auto version = file_.value<uint64_t>(9);
  if (version != 1) fail(path, format("version {}; only version 1 is known", version));
  const int code = file_.value<uint8_t>(17);
  const auto type = token_type_of(code);
  if (!type) {
    fail(path, format("element type {} is not a token type", code),
         "known: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16");
  }
  type_ = *type;

  const auto sequences = file_.value<uint64_t>(18);
  const auto boundaries = file_.value<uint64_t>(26);
  const auto size = static_cast<uint64_t>(file_.size());
  // The first two tests keep the product from overflowing.
  if (sequences > size / 12 || boundaries > size / 8 || size != kHeaderBytes + 12 * sequences + 8 * boundaries) {
    fail(path, format("{} sequences and {} document boundaries do not fit its {} bytes", sequences, boundaries, size),
         "the file is truncated, or multimodal, which is not supported");
  }
  sequences_ = static_cast<int64_t>(sequences);
  document_boundaries_ = static_cast<int64_t>(boundaries);
  if (sequences_ == 0) fail(path, "holds no sequences");
}

void MegatronIndex::check_sequences() {
  for (int64_t i = 0; i < sequences_; ++i) {
    if (length(i) < 0) fail(file_.path(), format("sequence {} has length {}", i, length(i)));
    if (byte_offset(i) != tokens_ * size_of(type_)) {
      fail(file_.path(), format("sequence {} begins at byte {}, but those before it end at byte {}", i, byte_offset(i),
                                tokens_ * size_of(type_)));
    }
    tokens_ += length(i);
  }
}

void MegatronIndex::check_documents() const {
  const int64_t last = document_boundaries_ - 1;
  if (last < 0 || document_boundary(0) != 0 || document_boundary(last) != sequences_) {
    fail(file_.path(), format("the document boundaries must run from 0 to the number of sequences, {}", sequences_));
  }
  for (int64_t i = 1; i <= last; ++i) {
    if (document_boundary(i) < document_boundary(i - 1)) {
      fail(file_.path(),
           format("document {} begins at sequence {}, before the document ahead of it", i, document_boundary(i)));
    }
  }
}

int32_t MegatronIndex::length(int64_t sequence) const {
  return file_.value<int32_t>(kHeaderBytes + 4 * sequence);
}

int64_t MegatronIndex::byte_offset(int64_t sequence) const {
  return file_.value<int64_t>(kHeaderBytes + 4 * sequences_ + 8 * sequence);
}

int64_t MegatronIndex::document_boundary(int64_t i) const {
  return file_.value<int64_t>(kHeaderBytes + 12 * sequences_ + 8 * i);
}

int64_t MegatronIndex::first_token(int64_t sequence) const {
  return byte_offset(sequence) / size_of(type_);
}

SequenceLengths MegatronIndex::lengths(Range sequences) const {
  INVAR_CHECK(sequences.begin >= 0 && sequences.end <= sequences_, "sequences [{}, {}) of {}", sequences.begin,
              sequences.end, sequences_);
  return SequenceLengths(file_.bytes().subspan(static_cast<size_t>(kHeaderBytes + 4 * sequences.begin),
                                               static_cast<size_t>(4 * sequences.size())));
}

}  // namespace invar
