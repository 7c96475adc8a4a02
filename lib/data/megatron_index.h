#pragma once

#include <cstdint>
#include <string>

#include "core/input_print.h"
#include "core/range.h"
#include "data/stored_array.h"
#include "data/token_array.h"

namespace invar {

// The .idx file of a Megatron indexed dataset, little endian:
//   9 bytes "MMIDIDX\0\0", u64 version = 1, u8 token type, u64 sequences, u64 documents + 1,
//   i32[sequences] lengths in tokens, i64[sequences] byte offsets in the .bin file, i64[documents + 1] first sequence
//   of each document, closed by the number of sequences.
// The header has 34 bytes, so that the arrays are not aligned. They stay in the file: an index may have 1e9 sequences.
class MegatronIndex {
 public:
  // Error{kData} if the file is not such an index, or contradicts itself.
  explicit MegatronIndex(const std::string& path);

  TokenType type() const { return type_; }
  int64_t sequences() const { return lengths_.size(); }
  int64_t documents() const { return document_starts_.size() - 1; }
  int64_t tokens() const { return tokens_; }
  InputPrint print() const { return print_of(*file_); }

  Range tokens_of(int64_t sequence) const;                          // where it lies in the .bin file
  const StoredArray<int32_t>& lengths() const { return lengths_; }  // (sequences) in tokens

 private:
  void read_header();
  void check_sequences();
  void check_documents() const;

  std::shared_ptr<const InputFile> file_;
  TokenType type_ = TokenType::kI32;
  int64_t tokens_ = 0;
  StoredArray<int32_t> lengths_;
  StoredArray<int64_t> byte_offsets_;
  StoredArray<int64_t> document_starts_;  // each a sequence, and the number of sequences
};

}  // namespace invar
