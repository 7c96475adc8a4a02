#pragma once

#include "comm/communicator.h"

namespace invar {

// A group of one, which has this rank in the job. A run on one device needs neither mpirun nor MPI.
std::unique_ptr<Communicator> make_self_communicator(std::string name = "world", int job_rank = 0);

}  // namespace invar
