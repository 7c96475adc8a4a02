#pragma once

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>

#include "core/unique_handle.h"

namespace invar {

// Held as long as it lives, however the process ends.
using FolderLock = UniqueHandle<int, ::close, -1>;

// A lock on a folder, which is created if need be, by its file `lock`. Error{kConfig} if another process holds it for
// that long: the ranks of a killed job take some seconds to end. in_use: what that one does, and hint: the fix.
// Error{kConfig} too if the folder cannot be used; {kFault} on a full or broken disk. On a file system without locks it
// holds nobody off.
FolderLock lock_folder(const std::filesystem::path& folder, const std::string& in_use, const std::string& hint,
                       std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace invar
