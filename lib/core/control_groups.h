#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace invar {

// Calls look() with the folder of this process's control group of a controller ("cpu", "memory") and of each group
// above it: the limits of all of them hold. A folder need not be there. root: of the file system, for tests.
using LookAtGroup = std::function<void(const std::filesystem::path& group, bool is_v2)>;
void for_control_groups(std::string_view controller, const std::filesystem::path& root, const LookAtGroup& look);

}  // namespace invar
