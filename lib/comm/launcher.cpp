#include "comm/launcher.h"

#include <charconv>
#include <cstring>

namespace invar {
namespace {

int number_or_zero(const char* text) {
  int number = 0;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), number);
  return number;
}

}  // namespace

std::optional<Launcher> find_launcher(const Environment& environment) {
  // mpirun inside a Slurm job leaves srun's variables of its own daemons in place: it goes first.
  const struct {
    const char* size;
    const char* launcher;
  } kLaunchers[] = {{"OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)"},
                    {"MV2_COMM_WORLD_SIZE", "mpirun (MVAPICH)"},
                    {"PMI_SIZE", "a PMI launcher (mpiexec of MPICH or Intel MPI, srun --mpi=pmi2)"}};
  for (const auto& [size, launcher] : kLaunchers) {
    if (const char* value = environment(size)) return Launcher{launcher, number_or_zero(value)};
  }
  const bool has_pmi = environment("PMIX_RANK") != nullptr || environment("PMI_RANK") != nullptr;
  // SLURM_NTASKS and SLURM_PROCID are also set in a batch script, where nothing was launched; this one is set by srun.
  if (const int tasks = number_or_zero(environment("SLURM_STEP_NUM_TASKS")); tasks > 1 || (tasks == 1 && has_pmi)) {
    return Launcher{"srun", tasks};
  }
  if (has_pmi) return Launcher{"a PMIx launcher", 0};
  return std::nullopt;
}

}  // namespace invar
