#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "support/temporary_folder.h"

namespace invar {

// Token files in a temporary folder, by name.
class TempFolder {
 public:
  std::string file(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    test::write_file(file(name), bytes);
    return file(name);
  }
  std::string read(const std::string& name) const { return test::read_file(file(name)); }

 private:
  test::TemporaryFolder folder_;
};

// The bytes of numbers as they lie in a file.
template <class T>
std::string packed(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> unpacked(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
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
    return magic + packed<uint64_t>({version}) + packed<uint8_t>({type}) +
           packed<uint64_t>({lengths.size(), documents.size()}) + packed(lengths) + packed(offsets) + packed(documents);
  }
};

// The Error that `action` throws, if it throws one.
template <class Action>
std::optional<Error> error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace invar

// The expression throws an Error of that kind whose message contains the text.
#define REQUIRE_ERROR(expression, error_kind, text)                     \
  do {                                                                  \
    const auto thrown = ::invar::error_of([&] { (void)(expression); }); \
    REQUIRE(thrown.has_value());                                        \
    CHECK(thrown->kind() == (error_kind));                              \
    INFO("message: " << thrown->what());                                \
    CHECK(::invar::contains(thrown->what(), text));                     \
  } while (false)
