#pragma once

#include <deque>
#include <optional>

#include "config/measured_speeds.h"
#include "device/device.h"
#include "parallel/topology.h"

namespace invar {

// How long each replica works in a step, of replicas that share the batch unequally. This is the time from the start of
// its first micro-batch to the end of its last backward pass, on the rank that takes longest. Waiting for ranks of the
// same replica is part of it; sums over replicas and new values of the step before are not (StepHooks::work).
class ReplicaWork {
 public:
  // config: what the plan was made from.
  ReplicaWork(const Config& config, const ReplicaPlan& plan) : config_(config), plan_(plan) {}
  // Forgets what was measured by the plan before, but not how many steps the next news take.
  void start_anew(const Config& config, const ReplicaPlan& plan);

  // For the step that follows, then finish_step(). Null if it is not timed: a timed step waits for new values, which
  // others hide behind their first layers.
  DeviceTimer* next_timer();
  void finish_step();
  // Seconds of this rank in a step. The first ones pay for warm-up, so they count for no speed.
  void add(double seconds);

  // Seconds of each replica in the last timed step. Collective over the world.
  std::vector<double> gather(const ProcessGroups& groups);
  // By the medians over the last timed steps as of the last gather(), the same on all ranks. Nothing before there is
  // one.
  std::optional<MeasuredSpeeds> speeds() const;
  // The same if they are far from the shares of the batch, at the soonest after kFirstNews timed steps. Once told, they
  // are news again after twice as many steps, so that a long run is not filled with them.
  std::optional<MeasuredSpeeds> news() const;
  void told() { next_news_ = 2 * steps_; }

  static constexpr int64_t kFirstSteps = 16;  // are timed, and of those that follow
  static constexpr int64_t kOneIn = 16;       // one in so many
  static constexpr int64_t kWarmUpSteps = 2;
  static constexpr size_t kLastSteps = 64;
  static constexpr int64_t kFirstNews = 8;

 private:
  Config config_;
  ReplicaPlan plan_;
  DeviceTimer timer_;
  int64_t all_steps_ = 0;
  bool timed_ = false;
  int64_t steps_ = 0;  // timed
  double last_ = 0;
  std::deque<double> recent_;
  std::vector<double> medians_;  // of each replica
  int64_t next_news_ = kFirstNews;
};

}  // namespace invar
