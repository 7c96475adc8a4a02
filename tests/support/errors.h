#pragma once

// What is expected of the errors that an action throws.

#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "core/error.h"
#include "support/catch.h"

namespace invar::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The Error that the action throws, if it throws one.
inline std::optional<Error> error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// The message of the Error, which must be of that kind; empty if none is thrown.
inline std::string message_of(ErrorKind kind, const std::function<void()>& action) {
  const std::optional<Error> error = error_of(action);
  if (!error) return "";
  INFO("message: " << error->what());
  CHECK(error->kind() == kind);
  return error->what();
}

// The action must throw an Error of that kind whose message holds each of the parts. Returns it.
inline Error require_error(ErrorKind kind, const std::vector<std::string>& message, const std::function<void()>& action,
                           std::source_location where = std::source_location::current()) {
  INFO("expected at " << where.file_name() << ":" << where.line());
  const std::optional<Error> error = error_of(action);
  REQUIRE(error.has_value());
  INFO("message: " << error->what());
  CHECK(error->kind() == kind);
  for (const std::string& part : message) {
    INFO("expected part: " << part);
    CHECK(contains(error->what(), part));
  }
  return *error;
}

// The same, and it must have a hint that holds each of these parts.
inline void require_error(ErrorKind kind, const std::vector<std::string>& message, const std::vector<std::string>& hint,
                          const std::function<void()>& action,
                          std::source_location where = std::source_location::current()) {
  const Error error = require_error(kind, message, action, where);
  INFO("expected at " << where.file_name() << ":" << where.line());
  INFO("hint: " << error.hint());
  CHECK_FALSE(error.hint().empty());
  for (const std::string& part : hint) {
    INFO("expected part of the hint: " << part);
    CHECK(contains(error.hint(), part));
  }
}

}  // namespace invar::test
