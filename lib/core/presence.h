#pragma once

#include <filesystem>
#include <string>

#include "core/error.h"

namespace invar {

// Whether there is something at the path. Missing is what does not exist, or has a longer name than anything can have.
// Error{kind} with the path, the system's reason and the hint if it cannot be looked at. The same for a link to what is
// not there: that may come back.
bool is_there(const std::filesystem::path& path, const std::string& hint = "", ErrorKind kind = ErrorKind::kData);

}  // namespace invar
