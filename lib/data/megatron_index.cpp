#include "data/megatron_index.h"

#include <array>
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

MegatronIndex::MegatronIndex(const std::string& path)
    : file_(std::make_shared<const InputFile>(path, "check data.path")) {
  read_header();
  check_sequences();
  check_documents();
}

void MegatronIndex::read_header() {
  const std::string& path = file_->path();
  std::array<char, kHeaderBytes> header{};
  const bool has_header = file_->size() >= kHeaderBytes;
  if (has_header) file_->read_at(0, std::span<char>(header));
  if (!has_header || !std::string_view(header.data(), header.size()).starts_with(kMagic)) {
    fail(path, "does not begin with MMIDIDX", "give the path of a Megatron .bin and .idx pair without the ending");
  }
  const auto number_at = [&]<class T>(T number, size_t byte) {
    std::memcpy(&number, header.data() + byte, sizeof(number));
    return number;
  };
  const uint64_t version = number_at(uint64_t{}, 9);
  if (version != 1) fail(path, format("version {}; only version 1 is known", version));
  const int code = number_at(uint8_t{}, 17);
  const auto type = token_type_of(code);
  if (!type) {
    fail(path, format("element type {} is not a token type", code),
         "known: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16");
  }
  type_ = *type;

  const uint64_t sequences = number_at(uint64_t{}, 18);
  const uint64_t boundaries = number_at(uint64_t{}, 26);
  const auto size = static_cast<uint64_t>(file_->size());
  // The first two tests keep the product from overflowing.
  if (sequences > size / 12 || boundaries > size / 8 || size != kHeaderBytes + 12 * sequences + 8 * boundaries) {
    fail(path, format("{} sequences and {} document boundaries do not fit its {} bytes", sequences, boundaries, size),
         "the file is truncated, or multimodal, which is not supported");
  }
  const auto count = static_cast<int64_t>(sequences);
  if (count == 0) fail(path, "holds no sequences");
  lengths_ = {file_, kHeaderBytes, count};
  byte_offsets_ = {file_, kHeaderBytes + 4 * count, count};
  document_starts_ = {file_, kHeaderBytes + 12 * count, static_cast<int64_t>(boundaries)};
}

void MegatronIndex::check_sequences() {
  std::vector<int32_t> lengths;
  visit_blocks(byte_offsets_, [&](int64_t first, std::span<const int64_t> offsets) {
    lengths.resize(offsets.size());
    lengths_.read(first, lengths);
    for (size_t i = 0; i < offsets.size(); ++i) {
      const int64_t sequence = first + static_cast<int64_t>(i);
      if (lengths[i] < 0) fail(file_->path(), format("sequence {} has length {}", sequence, lengths[i]));
      if (offsets[i] != tokens_ * size_of(type_)) {
        fail(file_->path(), format("sequence {} begins at byte {}, but those before it end at byte {}", sequence,
                                   offsets[i], tokens_ * size_of(type_)));
      }
      tokens_ += lengths[i];
    }
  });
}

void MegatronIndex::check_documents() const {
  const int64_t last = document_starts_.size() - 1;
  if (last < 0 || document_starts_[0] != 0 || document_starts_[last] != sequences()) {
    fail(file_->path(), format("the document boundaries must run from 0 to the number of sequences, {}", sequences()));
  }
  int64_t before = 0;
  visit_blocks(document_starts_, [&](int64_t first, std::span<const int64_t> starts) {
    for (size_t i = 0; i < starts.size(); before = starts[i++]) {
      if (starts[i] >= before) continue;
      fail(file_->path(), format("document {} begins at sequence {}, before the document ahead of it",
                                 first + static_cast<int64_t>(i), starts[i]));
    }
  });
}

Range MegatronIndex::tokens_of(int64_t sequence) const {
  std::array<int64_t, 2> ends = {0, tokens_ * size_of(type_)};  // in bytes
  byte_offsets_.read(sequence, std::span<int64_t>(ends).first(sequence + 1 < sequences() ? 2 : 1));
  return {ends[0] / size_of(type_), ends[1] / size_of(type_)};
}

}  // namespace invar
