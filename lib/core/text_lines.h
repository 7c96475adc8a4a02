#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace invar {

// Calls visit(number, line) for every line of a regular file of any size, from 1 on, without its newline. What follows
// the last newline is no line: the file may still grow, or its writer was killed. Throws Error{kData} as InputFile
// does, and for a line of more than 64 MiB.
void for_each_line(const std::string& path, const std::function<void(int64_t number, const std::string& line)>& visit,
                   const std::string& hint = "");

}  // namespace invar
