#pragma once

#include <functional>
#include <optional>
#include <string>

namespace invar {

// Who started this process, by its environment.
struct Launcher {
  std::string name;       // "mpirun", "srun", for messages
  int ranks = 0;          // processes that it says it started; 0 if it does not say
  int rank = 0;           // of this one, as it says
  bool knows_mpi = true;  // otherwise MPI cannot learn of the others by it
};

// The value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Null for a process started alone: by hand, in the script of a batch job, or as the only task of srun without PMI.
//
// srun without a PMI that MPI understands (--mpi=none) starts n processes that each would be a world of one and write
// the same files, as does torchrun. It shows itself as a launcher whose number of ranks MPI does not confirm: see
// check_launcher().
std::optional<Launcher> find_launcher(const Environment& environment);

// The launcher's processes must be one MPI job, not n jobs of one: Error{kConfig} if MPI sees one process of several.
void check_launcher(const Launcher& launcher, int mpi_size);

}  // namespace invar
