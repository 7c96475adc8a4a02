#pragma once

#include <string>

#include "comm/communicator.h"

namespace invar {

// Tells this host from others.
std::string this_host();

// What the ranks of one host have together.
struct HostShare {
  int ranks = 0;
  int64_t sum = 0;  // of their values
};
// Of the ranks that pass the same host as this one. Collective over the world.
HostShare share_of_host(Communicator& world, int64_t value, const std::string& host = this_host());

}  // namespace invar
