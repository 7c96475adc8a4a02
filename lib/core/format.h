#pragma once

// std::format for compilers that lack it: the fmt that spdlog brings.
#include <spdlog/fmt/fmt.h>

namespace invar {
using fmt::format;
}  // namespace invar
