#pragma once

#include <string>

namespace invar {

// What is wrong with the bytes of a file. Who knows the file's name makes an Error of it.
struct Damage {
  std::string what;
};

}  // namespace invar
