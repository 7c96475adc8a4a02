#pragma once

// Hand-made safetensors files and what is expected of errors about them.

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "support/catch.h"
#include "support/temporary_folder.h"

namespace invar::test {

// Little-endian bytes of values, as they lie in a file.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string result(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(result.data(), values.data(), result.size());
  return result;
}

inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  return bytes_of<uint64_t>({header.size()}) + header + data;
}

// Runs the action, which must throw an Error of that kind whose message holds each of the parts.
inline void require_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    INFO("message: " << error.what());
    CHECK(error.kind() == kind);
    for (const auto& part : parts) {
      INFO("expected part: " << part);
      CHECK(std::string(error.what()).find(part) != std::string::npos);
    }
    return;
  }
  FAIL("no error was thrown; expected one with: " << (parts.empty() ? "" : parts[0]));
}

}  // namespace invar::test
