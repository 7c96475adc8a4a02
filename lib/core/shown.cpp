#include "core/shown.h"

#include <algorithm>

#include "core/format.h"

namespace invar {

namespace {

// Bytes of the UTF-8 character at the start of text; 0 if there is none, or if it is a control character.
size_t printable_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return lead >= 0x20 && lead != 0x7f ? 1 : 0;
  const size_t bytes = lead >= 0xc2 && lead < 0xe0   ? 2
                       : lead >= 0xe0 && lead < 0xf0 ? 3
                       : lead >= 0xf0 && lead < 0xf5 ? 4
                                                     : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool is_control = lead == 0xc2 && second < 0xa0;
  const bool is_overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
  const bool is_no_character = (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
  return is_control || is_overlong || is_no_character ? 0 : bytes;
}

std::string escaped(char character) {
  if (character == '\n') return "\\n";
  if (character == '\r') return "\\r";
  if (character == '\t') return "\\t";
  return format("\\x{:02x}", static_cast<unsigned char>(character));
}

}  // namespace

std::string shown(std::string_view text, size_t limit) {
  std::string result;
  for (std::string_view rest = text; !rest.empty();) {
    if (result.size() >= limit) return format("{}... ({} bytes)", result, text.size());
    const size_t bytes = printable_bytes(rest);
    result += bytes == 0 ? escaped(rest.front()) : std::string(rest.substr(0, bytes));
    rest.remove_prefix(std::max<size_t>(1, bytes));
  }
  return result;
}

}  // namespace invar
