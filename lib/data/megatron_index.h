#pragma once

#include <cstdint>
#include <string>

#include "core/mapped_file.h"
#include "core/range.h"
#include "data/sequence_lengths.h"
#include "data/token_array.h"

namespace invar {

// The .idx file of a Megatron indexed dataset, little endian:
//   9 bytes "MMIDIDX\0\0", u64 version = 1, u8 token type, u64 sequences, u64 documents + 1,
//   i32[sequences] lengths in tokens, i64[sequences] byte offsets in the .bin file, i64[documents + 1] first sequence
//   of each document, closed by the number of sequences.
// The header has 34 bytes, so that the arrays are not aligned.
class MegatronIndex {
 public:
  // Error{kData} if the file is not such an index, or contradicts itself.
  explicit MegatronIndex(const std::string& path);

  TokenType type() const { return type_; }
  int64_t sequences() const { return sequences_; }
  int64_t documents() const { return document_boundaries_ - 1; }
  int64_t tokens() const { return tokens_; }

  int64_t first_token(int64_t sequence) const;     // position in the .bin file, in tokens
  SequenceLengths lengths(Range sequences) const;  // as long as this index lives

 private:
  int32_t length(int64_t sequence) const;
  void read_header();
  void check_sequences();
  void check_documents() const;
  int64_t byte_offset(int64_t sequence) const;
  int64_t document_boundary(int64_t i) const;

  MappedFile file_;
  TokenType type_ = TokenType::kI32;
  int64_t sequences_ = 0;
  int64_t document_boundaries_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace invar
