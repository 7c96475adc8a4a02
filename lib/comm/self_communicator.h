#pragma once

#include "comm/communicator.h"

namespace invar {

// A group of one. A run on one device needs neither mpirun nor MPI.
std::unique_ptr<Communicator> make_self_communicator(std::string name = "world");

}  // namespace invar
