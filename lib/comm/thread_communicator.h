#pragma once

#include <chrono>
#include <functional>

#include "comm/communicator.h"

namespace invar {

// Runs body(communicator) on `size` threads, one rank each, over memory of this process. The first exception of any
// rank is rethrown here; the other ranks, if they wait in a collective, are released with an error of their own. So are
// ranks that wait longer than the timeout, with one that names who does not come.
void run_thread_ranks(int size, const std::function<void(Communicator& world)>& body,
                      std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace invar
