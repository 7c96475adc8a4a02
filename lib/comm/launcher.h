#pragma once

#include <functional>
#include <optional>
#include <string>

namespace invar {

// Who started this process, by its environment.
struct Launcher {
  std::string name;  // "mpirun", "srun", for messages
  int ranks = 0;     // processes that it says it started; 0 if it does not say
};

// The value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Null for a process started alone: by hand, in the script of a batch job, or as the only task of srun without PMI.
//
// srun without a PMI that MPI understands (--mpi=none) starts n processes that each would be a world of one and write
// the same files. It shows itself as a launcher whose number of ranks MPI does not confirm: see MpiSession.
std::optional<Launcher> find_launcher(const Environment& environment);

}  // namespace invar
