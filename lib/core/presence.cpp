#include "core/presence.h"

namespace invar {

namespace fs = std::filesystem;

bool is_there(const fs::path& path, const std::string& hint, ErrorKind kind) {
  std::error_code error, ignored;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status)) return true;
  if (error == std::errc::filename_too_long) return false;
  if (status.type() != fs::file_type::not_found) {
    throw Error(kind, format("{}: cannot be looked at: {}", path.string(), error.message()), hint);
  }
  if (fs::is_symlink(fs::symlink_status(path, ignored))) {
    throw Error(kind, format("{}: is a link to what is not there", path.string()), hint);
  }
  return false;
}

}  // namespace invar
