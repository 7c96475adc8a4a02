#include "ops/cpu/threads.h"

#include <sys/resource.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "ops/cpu/parallel.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::ops::cpu;
using namespace std::chrono_literals;

namespace {

std::chrono::duration<double> cpu_time_of_process() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](timeval time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return std::chrono::duration<double>(seconds(usage.ru_utime) + seconds(usage.ru_stime));
}

}  // namespace

TEST_CASE("every index runs once, on a thread of its own, call after call with other counts") {
  for (const int count : {1, 2, 5, 3, 8, 1, 8}) {
    std::array<std::atomic<int>, 8> calls{};
    std::array<std::thread::id, 8> threads;
    run_on_threads(count, [&](int index) {
      ++calls[static_cast<size_t>(index)];
      threads[static_cast<size_t>(index)] = std::this_thread::get_id();
    });
    for (int index = 0; index < 8; ++index) {
      CHECK(calls[static_cast<size_t>(index)] == (index < count ? 1 : 0));
      for (int other = 0; other < index && index < count; ++other) {
        CHECK(threads[static_cast<size_t>(index)] != threads[static_cast<size_t>(other)]);
      }
    }
    CHECK(threads[0] == std::this_thread::get_id());
  }
}

TEST_CASE("a call from inside a body runs its indices in turn") {
  std::atomic<int> inner = 0;
  run_on_threads(3, [&](int) {
    const auto mine = std::this_thread::get_id();
    run_on_threads(4, [&](int) { inner += std::this_thread::get_id() == mine ? 1 : 100; });
  });
  CHECK(inner == 12);
}

TEST_CASE("thread ranks each have threads of their own") {
  std::atomic<int64_t> sum = 0;
  const auto rank = [&] {
    for (int call = 0; call < 200; ++call) {
      parallel_for(3, 3, kMinWorkPerThread, [&](Range range) { sum += range.size(); });
    }
  };
  std::thread first(rank), second(rank);
  first.join();
  second.join();
  CHECK(sum == 2 * 200 * 3);
}

// What a thread takes while it waits is taken from another rank's.
TEST_CASE("threads that wait for work or for the others use no core") {
  run_on_threads(4, [](int) {});
  const auto before = cpu_time_of_process();
  for (int call = 0; call < 20; ++call) {
    run_on_threads(4, [](int index) { std::this_thread::sleep_for(index == 3 ? 10ms : 0ms); });
    std::this_thread::sleep_for(10ms);
  }
  CHECK((cpu_time_of_process() - before) / 400ms < 0.25);
}
