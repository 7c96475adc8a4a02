#pragma once

// For tests whose ranks are threads. Catch's assertions are not made for several threads at once, so here they take
// turns. A checked expression must not call a collective: the other ranks would wait for the lock.
#include <mutex>

#include "support/catch.h"

namespace invar::test {

inline std::mutex& assertion_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace invar::test

#undef CHECK
#define CHECK(...)                                                                          \
  do {                                                                                      \
    const std::lock_guard turn(invar::test::assertion_mutex());                             \
    INTERNAL_CATCH_TEST("CHECK", Catch::ResultDisposition::ContinueOnFailure, __VA_ARGS__); \
  } while (false)

#undef REQUIRE
#define REQUIRE(...)                                                               \
  do {                                                                             \
    const std::lock_guard turn(invar::test::assertion_mutex());                    \
    INTERNAL_CATCH_TEST("REQUIRE", Catch::ResultDisposition::Normal, __VA_ARGS__); \
  } while (false)
