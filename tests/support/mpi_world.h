#pragma once

#include "comm/mpi_communicator.h"

namespace invar {

// The session that mpi_main.cpp holds: Catch2 hands its test cases no arguments.
MpiSession& mpi_session();

}  // namespace invar
