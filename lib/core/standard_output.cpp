#include "core/standard_output.h"

#include "core/whole_write.h"

#include <unistd.h>

namespace invar {

int write_standard_output(const std::string& line) {
  return write_whole(STDOUT_FILENO, line + "\n").error;
}

}  // namespace invar
