#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace invar {

// Text of a file or of a user, made fit for a message: at most about `limit` bytes, then "..." and the whole length.
// Control characters and bytes that are not UTF-8 are shown as \n, \t or \xNN. A message keeps one line and a terminal
// its state.
std::string shown(std::string_view text, size_t limit = 80);

}  // namespace invar
