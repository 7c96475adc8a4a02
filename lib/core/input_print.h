#pragma once

#include <cstdint>
#include <string>

#include "core/input_file.h"

namespace invar {

// What tells one input of a run from another of the same name.
struct InputPrint {
  std::string name;   // for messages: the path
  int64_t size = 0;   // in bytes
  uint64_t hash = 0;  // of some of its bytes
};

// Size and contents of a file, at the cost of 16 reads: the first and the last 64 KiB, and 14 pages of 4 KiB spread
// evenly between them. A file of up to 184 KiB is read whole. The pages depend on the size alone. Error of the file's
// kind if it cannot be read.
InputPrint print_of(const InputFile& file);

}  // namespace invar
