#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

#include "core/format.h"

namespace invar {

// What went wrong, and the exit code that app/main.cpp gives it.
enum class ErrorKind : int {
  kFault = 1,   // a defect or a failing machine
  kConfig = 2,  // usage or configuration: the user can fix it
  kData = 3,    // token data, weights or a checkpoint cannot be used
};

// The one exception of the library. The message is for a person: what, where (file, key, tensor), the rule.
// The hint, if any, is the likely fix and is printed on a line of its own.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string hint = "",
        std::source_location where = std::source_location::current())
      : std::runtime_error(message), kind_(kind), hint_(std::move(hint)), where_(where) {}

  ErrorKind kind() const { return kind_; }
  const std::string& hint() const { return hint_; }
  // "lib/ops/matmul.cpp:42"; printed for faults only.
  std::string location() const;
  // The same error with its circumstances in front: "step 12: ...".
  Error in(const std::string& circumstances) const {
    return Error(kind_, circumstances + ": " + what(), hint_, where_);
  }

 private:
  ErrorKind kind_;
  std::string hint_;
  std::source_location where_;
};

// A condition that only a defect in invar can break. Throws Error{kFault} with the condition's text.
#define INVAR_CHECK(condition, ...)                                                                       \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      throw ::invar::Error(::invar::ErrorKind::kFault,                                                    \
                           std::string("check failed: " #condition ": ") + ::invar::format(__VA_ARGS__)); \
    }                                                                                                     \
  } while (false)

}  // namespace invar
