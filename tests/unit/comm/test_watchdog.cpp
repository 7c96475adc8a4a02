#include "comm/watchdog.h"

#include <atomic>
#include <functional>
#include <future>
#include <stdexcept>

#include "support/catch.h"

using namespace invar;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

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

// Calls `attempt` until it says that it did what it had to do before the watchdog could report anything. On a busy
// machine a thread may stand still for longer than the timeout, and then there is nothing to judge.
void within_a_timeout(const std::function<bool(std::chrono::milliseconds)>& attempt) {
  for (auto timeout = 250ms; !attempt(timeout); timeout *= 2) REQUIRE(timeout < 1min);
}

}  // namespace

TEST_CASE("work that does not finish is reported, with what came before and how much waits behind") {
  within_a_timeout([](std::chrono::milliseconds timeout) {
    Listener listener;
    const auto start = Clock::now();
    Watchdog watchdog(timeout, listener.report());
    watchdog.watch(nullptr, "all_reduce 1", [] { return true; });
    watchdog.watch(nullptr, "all_gather 2", [] { return false; });
    watchdog.watch(nullptr, "all_reduce 3", [] { return false; });
    if (Clock::now() - start >= timeout) return false;
    const std::string said = listener.wait();
    CHECK(contains(said, "all_gather 2: not done"));
    CHECK(contains(said, "1 more wait behind it"));
    CHECK(contains(said, "the last one done: all_reduce 1"));
    return true;
  });
}

TEST_CASE("a failure is reported at once") {
  Listener listener;
  Watchdog watchdog(1h, listener.report());
  watchdog.watch(nullptr, "broadcast 1", []() -> bool { throw std::runtime_error("remote process exited"); });
  CHECK(contains(listener.wait(), "broadcast 1: remote process exited"));  // not after an hour
}

TEST_CASE("a failure behind work that hangs is reported at once") {
  Listener listener;
  Watchdog watchdog(1h, listener.report());
  watchdog.watch(nullptr, "all_reduce 1", [] { return false; });
  watchdog.watch(nullptr, "all_reduce 2", []() -> bool { throw std::runtime_error("remote process exited"); });
  CHECK(contains(listener.wait(), "all_reduce 2: remote process exited"));
}

TEST_CASE("work that waited for its turn has its time from then on") {
  Listener listener;
  Watchdog watchdog(400ms, listener.report());
  const auto start = Clock::now();
  watchdog.watch(nullptr, "all_reduce 1", [&] { return Clock::now() - start > 250ms; });
  watchdog.watch(nullptr, "all_reduce 2", [] { return false; });
  CHECK(contains(listener.wait(), "all_reduce 2: not done"));
  CHECK(Clock::now() - start >= 650ms);
}

TEST_CASE("a question that is not answered is reported") {
  std::promise<void> answer;
  Listener listener;
  Watchdog watchdog(500ms, listener.report());
  watchdog.watch(nullptr, "all_reduce 1", [&] {
    answer.get_future().wait();
    return true;
  });
  CHECK(contains(listener.wait(), "all_reduce 1: the device does not answer"));
  answer.set_value();
}

TEST_CASE("nobody asks about work whose owner has gone") {
  within_a_timeout([](std::chrono::milliseconds timeout) {
    std::atomic<bool> gone = false;
    std::atomic<bool> asked_late = false;
    std::atomic<int> asked = 0;
    Listener listener;
    const auto start = Clock::now();
    Watchdog watchdog(timeout, listener.report());
    const int owner = 0;
    watchdog.watch(&owner, "of the owner", [&] {
      asked_late = gone.load();
      ++asked;
      return false;
    });
    while (asked == 0) std::this_thread::yield();
    watchdog.forget(&owner);
    gone = true;
    if (Clock::now() - start >= timeout) return false;
    watchdog.watch(nullptr, "of another", [] { return false; });
    CHECK(contains(listener.wait(), "of another: not done"));
    CHECK(!asked_late);
    return true;
  });
}

TEST_CASE("work that finishes in time is not reported, and the watchdog ends with its owner") {
  std::atomic<int> reports = 0;
  std::atomic<bool> asked = false;
  {
    Watchdog watchdog(1h, [&](const std::string&) { ++reports; });
    watchdog.watch(nullptr, "all_reduce 1", [&] { return asked.exchange(true); });  // done at the second look
    while (!asked) std::this_thread::yield();
  }
  CHECK(reports == 0);
}

TEST_CASE("the thread of the watchdog is prepared before it looks at anything") {
  std::atomic<bool> prepared = false;
  Listener listener;
  Watchdog watchdog(1h, listener.report(), [&] { prepared = true; });
  watchdog.watch(nullptr, "w", [&]() -> bool { throw std::runtime_error(prepared ? "prepared" : "not prepared"); });
  CHECK(contains(listener.wait(), "w: prepared"));
}
