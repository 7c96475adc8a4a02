#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "app/commands.h"
#include "comm/checks.h"
#include "comm/thread_communicator.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::app;

TEST_CASE("more threads than cores are told with the number to set") {
  CHECK(too_many_threads(1, 2, 2).empty());
  CHECK(too_many_threads(8, 2, 16).empty());
  CHECK(too_many_threads(2, 2, 2) ==
        "2 ranks of 2 threads share 2 cores of this host and wait for each other: set OMP_NUM_THREADS=1");
  CHECK(too_many_threads(16, 4, 18).ends_with("set OMP_NUM_THREADS=4"));
  CHECK(too_many_threads(1, 4, 2).ends_with("start at most 2 ranks here, with OMP_NUM_THREADS=1"));
}

TEST_CASE("threads follow from the cores of the host's ranks, unless OMP_NUM_THREADS says how many") {
  const char* before = std::getenv("OMP_NUM_THREADS");
  const std::string kept = before == nullptr ? "" : before;
  unsetenv("OMP_NUM_THREADS");
  const int own = usable_cores(bound_cores());
  CHECK(threads_per_rank(1) == own);
  CHECK(threads_per_rank(4, 4 * own) == own);  // a rank that the launcher has bound to a part of the host
  CHECK(threads_per_rank(2 * own + 1, own) == 1);
  setenv("OMP_NUM_THREADS", "3", 1);
  CHECK(threads_per_rank(100, 1) == 3);
  before == nullptr ? unsetenv("OMP_NUM_THREADS") : setenv("OMP_NUM_THREADS", kept.c_str(), 1);
}

TEST_CASE("a wait that fails in a part of the set-up is waited for once and names its call") {
  std::atomic<bool> failed = false;
  std::string told;
  const auto body = [&](Communicator& world) {
    if (world.rank() == 1) {
      while (!failed) std::this_thread::yield();
      return;
    }
    try {
      together(world, [&] { world.barrier(); });
    } catch (const Error& error) {
      told = error.what();
    }
    failed = true;
  };
  run_thread_ranks(2, body, std::chrono::milliseconds(50));
  CHECK(told.starts_with("barrier in group 'world'"));
}

TEST_CASE("a signal that whoever started the process has it ignore stays ignored where nothing can be saved") {
  std::signal(SIGUSR2, SIG_IGN);
  CHECK(*catch_stop_signals() == 0);
  catch_stop_signals();  // again, as a run does
  std::raise(SIGUSR2);
  CHECK(*catch_stop_signals() == SIGUSR2);
  heed_stop_signals();
  CHECK(std::signal(SIGUSR2, SIG_DFL) == SIG_IGN);
}
