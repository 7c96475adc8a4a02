#pragma once

#include <string>

#include "support/bytes.h"

namespace invar::test {

// A hand-made safetensors file.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  return bytes_of<uint64_t>({header.size()}) + header + data;
}

}  // namespace invar::test
