#pragma once

#include <cerrno>
#include <string>

#include "core/file_error.h"
#include "core/standard_output.h"

namespace invar::app {

// One line of a subcommand's result, on standard output. Error{kFault} with the system's reason if it cannot be
// written; but a reader who has gone wants no more of it.
inline void print_line(const std::string& text) {
  if (const int error = write_standard_output(text); error != 0 && error != EPIPE) {
    fail_file("standard output", "cannot be written", error);
  }
}

}  // namespace invar::app
