#pragma once

#include <cstdio>
#include <string>

namespace invar::app {

// One line of a subcommand's result, on standard output.
inline void print_line(const std::string& text) {
  std::fputs((text + "\n").c_str(), stdout);
}

}  // namespace invar::app
