#pragma once

#include <functional>

#include "comm/communicator.h"

namespace invar {

// Runs body(communicator) on `size` threads, one rank each, over memory of this process. The first exception of any
// rank is rethrown here; the other ranks, if they wait in a collective, are released with an error of their own.
void run_thread_ranks(int size, const std::function<void(Communicator& world)>& body);

}  // namespace invar
