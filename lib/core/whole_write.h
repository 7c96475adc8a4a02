#pragma once

#include <string_view>

namespace invar {

// How much of a text was written, and the error number of what kept the rest; 0 if nothing did.
struct Written {
  size_t bytes = 0;
  int error = 0;
};

// All of the text to a descriptor, in one call of the system if it takes it in one. Waits where the descriptor does
// not.
Written write_whole(int descriptor, std::string_view text);

}  // namespace invar
