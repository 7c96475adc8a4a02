#pragma once

#include <string>

namespace invar {

// Writes a line to standard output at once. Returns 0, or the error number of what kept it from being written. That is
// EPIPE where the reader has gone (with SIGPIPE ignored), ENOSPC on a full disk.
int write_standard_output(const std::string& line);

}  // namespace invar
