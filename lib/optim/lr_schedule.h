#pragma once

#include "config/config.h"

namespace invar {

// Learning rate of a step, counted from 1, as in Megatron-LM: step k uses n = k − 1 finished steps. Warm-up is linear
// from 0 (so with warm-up the first step changes nothing); then constant, or a decay from lr to min_lr, which is
// reached at n = decay_steps (resolved: not 0): cosine, linear, or wsd (flat, then linear over the last
// wsd_decay_steps).
double learning_rate(const ScheduleConfig& schedule, double lr, int64_t decay_steps, int64_t step);

}  // namespace invar
