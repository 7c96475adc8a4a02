#pragma once

#include <chrono>
#include <csignal>
#include <string>

#include "comm/communicator.h"
#include "config/config.h"

namespace invar {

// Whether the run should save and end before its last step. All ranks ask together, and what one of them knows (a
// signal, its clock) holds for all.
class StopControl {
 public:
  // signal: the last signal that asked for it, 0 if none; set by a handler, which app/ installs. Null, on all ranks:
  // none can.
  StopControl(const TrainConfig& config, const volatile std::sig_atomic_t* signal)
      : config_(config), signal_(signal), start_(std::chrono::steady_clock::now()) {}

  // After `steps` steps of this run: why it should stop, for the log, or nothing. Collective.
  std::string reason(Communicator& world, int64_t steps) const;
  // After another step; one object counts those of all trainers of a process. Collective.
  std::string after_step(Communicator& world) { return reason(world, ++steps_); }
  int64_t steps() const { return steps_; }

 private:
  const TrainConfig& config_;
  const volatile std::sig_atomic_t* signal_;
  std::chrono::steady_clock::time_point start_;
  int64_t steps_ = 0;
};

}  // namespace invar
