#pragma once

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "core/unique_handle.h"

namespace invar {

// Held as long as it lives, however the process ends.
using FolderLock = UniqueHandle<int, ::close, -1>;

// A lock by a file, which is created with its folder if need be. It is empty if another process holds the file for that
// long, and on a file system without locks it holds nobody off. Who has no `patience` waits for ever and needs the
// lock. Error{kConfig} if the path cannot be used, {kFault} on a full or broken disk.
FolderLock lock_file(const std::filesystem::path& path, std::optional<std::chrono::milliseconds> patience = {});

// A lock on a folder by its file `lock`. Error{kConfig} if another process holds it for that long: the ranks of a
// killed job take some seconds to end. in_use: what that one does, and hint: the fix. Other errors as those of
// lock_file().
FolderLock lock_folder(const std::filesystem::path& folder, const std::string& in_use, const std::string& hint,
                       std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace invar
