#include "data/token_array.h"

#include <algorithm>
#include <array>
#include <utility>

namespace invar {

int64_t size_of(TokenType type) {
  switch (type) {
    case TokenType::kU8:
    case TokenType::kI8:
      return 1;
    case TokenType::kI16:
    case TokenType::kU16:
      return 2;
    case TokenType::kI32:
    case TokenType::kU32:
      return 4;
    case TokenType::kI64:
      return 8;
  }
  return 0;
}

std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return "uint8";
    case TokenType::kI8:
      return "int8";
    case TokenType::kI16:
      return "int16";
    case TokenType::kI32:
      return "int32";
    case TokenType::kI64:
      return "int64";
    case TokenType::kU16:
      return "uint16";
    case TokenType::kU32:
      return "uint32";
  }
  return "";
}

TokenArray::TokenArray(InputFile file, int64_t first_byte, TokenType type, std::string source, int64_t vocab_size)
    : file_(std::move(file)),
      first_byte_(first_byte),
      type_(type),
      source_(std::move(source)),
      size_((file_.size() - first_byte) / size_of(type)),
      vocab_size_(vocab_size) {
  if (file_.size() != first_byte + size_ * size_of(type)) {
    throw Error(ErrorKind::kData,
                format("token file {}: {} bytes after a header of {} are not a whole number of {} tokens", path(),
                       file_.size() - first_byte, first_byte, name_of(type)),
                format("the file is truncated, or its tokens are not {}, as {} says", name_of(type), source_));
  }
}

void TokenArray::read(int64_t first, std::span<int32_t> out) const {
  INVAR_CHECK(first >= 0 && first + std::ssize(out) <= size_, "{}: tokens {} + {} of {}", path(), first, out.size(),
              size_);
  switch (type_) {
    case TokenType::kU8:
      return read_as<uint8_t>(first, out);
    case TokenType::kI8:
      return read_as<int8_t>(first, out);
    case TokenType::kI16:
      return read_as<int16_t>(first, out);
    case TokenType::kI32:
      return read_as<int32_t>(first, out);
    case TokenType::kI64:
      return read_as<int64_t>(first, out);
    case TokenType::kU16:
      return read_as<uint16_t>(first, out);
    case TokenType::kU32:
      return read_as<uint32_t>(first, out);
  }
}

template <class T>
void TokenArray::read_as(int64_t first, std::span<int32_t> out) const {
  std::array<T, 4096> block;
  while (!out.empty()) {
    const auto stored = std::span(block).first(std::min(block.size(), out.size()));
    file_.read_at(first_byte_ + first * static_cast<int64_t>(sizeof(T)), stored);
    for (size_t i = 0; i < stored.size(); ++i) {
      const auto id = static_cast<int64_t>(stored[i]);
      if (id < 0 || id >= vocab_size_) refuse_id(first + static_cast<int64_t>(i), id);
      out[i] = static_cast<int32_t>(id);
    }
    first += std::ssize(stored);
    out = out.subspan(stored.size());
  }
}

void TokenArray::refuse_id(int64_t position, int64_t id) const {
  throw Error(
      ErrorKind::kData,
      format("token file {}: token {} has id {}, outside the vocabulary [0, {})", path(), position, id, vocab_size_),
      format("model.vocab_size must exceed every id of the file; if the id is nonsense, the tokens are not {}, "
             "as {} says",
             name_of(type_), source_));
}

}  // namespace invar
