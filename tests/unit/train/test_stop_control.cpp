#include "train/stop_control.h"

#include <array>

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("A run goes on until its steps are done, counted from its own start") {
  TrainConfig config;
  config.exit_after_steps = 3;
  run_thread_ranks(2, [&](Communicator& world) {
    const StopControl stop(config, nullptr);
    const std::string early = stop.reason(world, 2);
    const std::string due = stop.reason(world, 3);
    CHECK(early.empty());
    CHECK(due == "train.exit_after_steps = 3");
  });
}

TEST_CASE("One object counts the steps of trainers that follow each other") {
  TrainConfig config;
  config.exit_after_steps = 3;
  run_thread_ranks(2, [&](Communicator& world) {
    StopControl stop(config, nullptr);
    std::vector<bool> stops;
    for (int step = 0; step < 3; ++step) stops.push_back(!stop.after_step(world).empty());
    CHECK(stops == std::vector<bool>{false, false, true});
    CHECK(stop.steps() == 3);
  });
}

TEST_CASE("Without a limit nothing stops a run, and time does once it is up") {
  TrainConfig config;
  run_thread_ranks(1, [&](Communicator& world) {
    CHECK(StopControl(config, nullptr).reason(world, 1 << 20).empty());
    config.exit_after_minutes = 1e-12;
    CHECK(StopControl(config, nullptr).reason(world, 0) == "train.exit_after_minutes = 1e-12");
    config.exit_after_minutes = 1e6;
    CHECK(StopControl(config, nullptr).reason(world, 0).empty());
  });
}

TEST_CASE("A signal that one rank got stops all, before any other reason") {
  TrainConfig config;
  config.exit_after_steps = 1;
  std::array<volatile std::sig_atomic_t, 3> signals = {0, SIGUSR1, 0};
  run_thread_ranks(3, [&](Communicator& world) {
    const StopControl stop(config, &signals[static_cast<size_t>(world.rank())]);
    const std::string reason = stop.reason(world, 1);
    CHECK(reason == "signal USR1");
  });
}
