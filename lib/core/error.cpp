#include "core/error.h"

#include <string_view>

namespace invar {

std::string Error::location() const {
  std::string_view file = where_.file_name();
  for (std::string_view top : {"/lib/", "/app/", "/tests/"}) {
    if (const auto at = file.rfind(top); at != std::string_view::npos) {
      file.remove_prefix(at + 1);
      break;
    }
  }
  return format("{}:{}", file, where_.line());
}

}  // namespace invar
