#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/token_source.h"
#include "support/bytes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

namespace invar::test {

// The S + 1 tokens of a sample.
inline std::vector<int32_t> sample_of(const TokenSource& source, int64_t sample) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.sequence_length()) + 1);
  source.read(sample, tokens);
  return tokens;
}

// The bytes of an .idx file, built field by field; one document per boundary pair.
struct IndexBytes {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t type = 8;
  std::vector<int32_t> lengths;
  std::vector<int64_t> offsets;
  std::vector<int64_t> documents;

  // Every sequence a document, tokens of `token_bytes` bytes.
  static IndexBytes of(const std::vector<int32_t>& lengths, uint8_t type, int64_t token_bytes) {
    IndexBytes index;
    index.type = type;
    index.lengths = lengths;
    int64_t offset = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      index.offsets.push_back(offset);
      index.documents.push_back(static_cast<int64_t>(i));
      offset += lengths[i] * token_bytes;
    }
    index.documents.push_back(static_cast<int64_t>(lengths.size()));
    return index;
  }

  std::string bytes() const {
    return magic + bytes_of<uint64_t>({version}) + bytes_of<uint8_t>({type}) +
           bytes_of<uint64_t>({lengths.size(), documents.size()}) + bytes_of(lengths) + bytes_of(offsets) +
           bytes_of(documents);
  }
};

}  // namespace invar::test
