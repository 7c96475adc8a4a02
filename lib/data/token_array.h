#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/input_file.h"
#include "core/input_print.h"

namespace invar {

enum class TokenType : uint8_t { kU8, kI8, kI16, kI32, kI64, kU16, kU32 };

int64_t size_of(TokenType type);           // bytes per token
std::string_view name_of(TokenType type);  // "uint16", "int32", ...

// A .bin file seen as one array of token ids: `first_byte` bytes of header, then integers to the end of the file.
class TokenArray {
 public:
  // source: what says that the tokens are of this type, for messages: "data.token_dtype". Error{kData} if what follows
  // the header is not a whole number of tokens.
  TokenArray(InputFile file, int64_t first_byte, TokenType type, std::string source, int64_t vocab_size);

  const std::string& path() const { return file_.path(); }
  TokenType type() const { return type_; }
  const std::string& source() const { return source_; }  // of the type
  int64_t size() const { return size_; }
  InputPrint print() const { return print_of(file_); }

  // Fills `out` with the tokens from index `first` on. Error{kData}, naming file, position and id, if one of them is
  // outside [0, vocab_size), or if the file cannot be read any more.
  void read(int64_t first, std::span<int32_t> out) const;

 private:
  template <class T>
  void read_as(int64_t first, std::span<int32_t> out) const;
  [[noreturn]] void refuse_id(int64_t position, int64_t id) const;

  InputFile file_;
  int64_t first_byte_;
  TokenType type_;
  std::string source_;
  int64_t size_;
  int64_t vocab_size_;
};

}  // namespace invar
