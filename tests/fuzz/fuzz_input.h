#pragma once

// What a fuzz target needs: a file of the input's bytes, and the rule that every reader keeps.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace invar::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// The path of a file of that name with these bytes, in a folder in memory that only this process has.
std::string file(const std::string& name, std::string_view bytes);
// That folder.
std::string folder();

// Calls read(), which may refuse what it reads, and returns whether it did not. A refusal is an Error{kConfig} or
// Error{kData} whose message names one of the texts in `named`, is short, and keeps to printable characters. Any other
// one is a finding: what the message is goes to stderr, and the process ends.
bool reads_or_refuses(std::initializer_list<std::string_view> named, const std::function<void()>& read);

// A finding unless the condition holds.
void expect(bool condition, const char* what);

}  // namespace invar::fuzz
