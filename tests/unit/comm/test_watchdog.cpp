#include "comm/watchdog.h"

#include <atomic>
#include <future>
#include <stdexcept>

#include "support/catch.h"

using namespace invar;
using namespace std::chrono_literals;

namespace {

// What the watchdog says first; the tests' own timeout ends a wait for one that says nothing.
struct Listener {
  std::promise<std::string> said;
  Watchdog::Report report() {
    return [this](const std::string& text) { said.set_value(text); };
  }
  std::string wait() { return said.get_future().get(); }
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("work that does not finish is reported, with what came before and how much waits behind") {
  Listener listener;
  Watchdog watchdog(50ms, listener.report());
  watchdog.watch("all_reduce 1", [] { return true; });
  watchdog.watch("all_gather 2", [] { return false; });
  watchdog.watch("all_reduce 3", [] { return true; });
  const std::string said = listener.wait();
  CHECK(contains(said, "all_gather 2: not done"));
  CHECK(contains(said, "1 more wait behind it"));
  CHECK(contains(said, "the last one done: all_reduce 1"));
}

TEST_CASE("a failure is reported at once") {
  Listener listener;
  Watchdog watchdog(1h, listener.report());
  const auto start = std::chrono::steady_clock::now();
  watchdog.watch("broadcast 1", []() -> bool { throw std::runtime_error("remote process exited"); });
  CHECK(contains(listener.wait(), "broadcast 1: remote process exited"));
  CHECK(std::chrono::steady_clock::now() - start < 1min);
}

TEST_CASE("work that finishes in time is not reported, and the watchdog ends with its owner") {
  std::atomic<int> reports = 0;
  std::atomic<bool> asked = false;
  {
    Watchdog watchdog(20ms, [&](const std::string&) { ++reports; });
    watchdog.watch("all_reduce 1", [&] { return asked.exchange(true); });  // done at the second look
    while (!asked) std::this_thread::yield();
    std::this_thread::sleep_for(60ms);
  }
  CHECK(reports == 0);
}

TEST_CASE("the thread of the watchdog is prepared before it looks at anything") {
  std::atomic<bool> prepared = false;
  Listener listener;
  Watchdog watchdog(1h, listener.report(), [&] { prepared = true; });
  watchdog.watch("w", [&]() -> bool { throw std::runtime_error(prepared ? "prepared" : "not prepared"); });
  CHECK(contains(listener.wait(), "w: prepared"));
}
