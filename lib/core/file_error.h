#pragma once

#include <filesystem>
#include <source_location>

#include "core/error.h"

namespace invar {

// Throws "FILE: WHAT: the reason of errno", with the fix for what is known: a full disk, a limit, permissions.
// error: a value of errno.
[[noreturn]] void fail_file(ErrorKind kind, const std::filesystem::path& file, const char* what, int error,
                            std::source_location where = std::source_location::current());
// Kind kFault.
[[noreturn]] void fail_file(const std::filesystem::path& file, const char* what, int error,
                            std::source_location where = std::source_location::current());

// The fix that fail_file() gives for this error number; empty if none is known.
std::string fix_of_file_error(int error);

// kConfig where a path that the user chose cannot be used; kFault where the machine fails: a full disk, a broken one.
ErrorKind kind_of_unusable(int error);

}  // namespace invar
