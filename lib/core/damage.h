#pragma once

#include <string>

namespace invar {

// What is wrong with a file that is there. Who knows its name, or what to do about it, catches this.
struct Damage {
  std::string what;
};

}  // namespace invar
