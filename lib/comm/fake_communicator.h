#pragma once

#include "comm/communicator.h"

namespace invar {

// A rank of a group whose peers do not exist, on host or device memory: to time and size one rank of a large job alone.
// Nothing waits. A part that a peer would give is a copy of what this rank has, so that numbers stay numbers of their
// kind: in all_gather, all_to_all and exchange; a reduction leaves this rank's terms, and what would come by broadcast
// or receive, or where this rank has nothing to give, stays as it is. It cannot split: parallel/topology computes
// groups from ranks alone.
std::unique_ptr<Communicator> make_fake_communicator(int rank, int size, std::string name);

}  // namespace invar
