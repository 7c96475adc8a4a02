#include "core/file_error.h"

#include <cerrno>
#include <cstring>

namespace invar {

void fail_file(ErrorKind kind, const std::filesystem::path& file, const char* what, int error,
               std::source_location where) {
  throw Error(kind, format("{}: {}: {}", file.string(), what, std::strerror(error)), fix_of_file_error(error), where);
}

void fail_file(const std::filesystem::path& file, const char* what, int error, std::source_location where) {
  fail_file(ErrorKind::kFault, file, what, error, where);
}

std::string fix_of_file_error(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free some space or write to another disk";
    case EFBIG:
      return "raise the limit on the size of files (ulimit -f) or write to another disk";
    case EACCES:
    case EPERM:
    case EROFS:
      return "name a folder where this user may write";
    case ENOENT:
    case ENOTDIR:
    case EEXIST:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return "name a folder that is one, or can be made, on a disk that is writable";
    case EMFILE:
    case ENFILE:
      return "raise the limit on open files (ulimit -n)";
    default:
      return "";
  }
}

ErrorKind kind_of_unusable(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EIO:
    case ESTALE:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return ErrorKind::kFault;
    default:
      return ErrorKind::kConfig;
  }
}

}  // namespace invar
