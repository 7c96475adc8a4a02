#include "comm/launcher.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "core/error.h"

namespace invar {
namespace {

int number_or_zero(const char* text) {
  int number = 0;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), number);
  return number;
}

}  // namespace

std::optional<Launcher> find_launcher(const Environment& environment) {
  // The first one found counts: mpirun inside a Slurm job leaves srun's variables of its own daemons in place.
  const struct {
    const char* name;
    const char* size;
    const char* rank;
  } kLaunchers[] = {{"mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                    {"mpirun (MVAPICH)", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                    {"a PMI launcher (mpiexec of MPICH or Intel MPI, srun --mpi=pmi2)", "PMI_SIZE", "PMI_RANK"}};
  for (const auto& [name, size, rank] : kLaunchers) {
    const char* ranks = environment(size);
    const char* number = environment(rank);
    const bool is_slurms = ranks == nullptr && environment("SLURM_STEP_NUM_TASKS") != nullptr;
    if ((ranks != nullptr || number != nullptr) && !is_slurms) {
      return Launcher{name, number_or_zero(ranks), number_or_zero(number)};
    }
  }
  const int pmi_rank = number_or_zero(environment("PMIX_RANK"));
  const bool has_pmi = environment("PMIX_RANK") != nullptr || environment("PMI_RANK") != nullptr;
  // SLURM_NTASKS and SLURM_PROCID are also set in a batch script, where nothing was launched; this one is set by srun.
  if (const int tasks = number_or_zero(environment("SLURM_STEP_NUM_TASKS")); tasks > 1 || (tasks == 1 && has_pmi)) {
    return Launcher{"srun", tasks, number_or_zero(environment("SLURM_PROCID"))};
  }
  if (has_pmi) return Launcher{"a PMIx launcher", 0, pmi_rank, environment("PMIX_NAMESPACE") != nullptr};
  // Of one process it is as good as no launcher.
  if (const int ranks = number_or_zero(environment("WORLD_SIZE")); ranks > 1 && environment("RANK") != nullptr) {
    return Launcher{"torchrun (or what else sets RANK and WORLD_SIZE)", ranks, number_or_zero(environment("RANK")),
                    false};
  }
  return std::nullopt;
}

void check_launcher(const Launcher& launcher, int mpi_size) {
  const int ranks = std::max(launcher.ranks, launcher.rank + 1);
  if (mpi_size > 1 || (ranks == 1 && launcher.knows_mpi)) return;
  const std::string fix =
      "start with the mpirun of the MPI that invar was built with, or with srun --mpi=pmix "
      "(srun --mpi=list shows what there is)";
  if (ranks == 1) {
    throw Error(ErrorKind::kConfig,
                "PMIX_RANK is set, but nothing else of a PMIx launcher: MPI cannot find the other processes, and each "
                "would run the whole job by itself",
                fix + "; to run alone unset PMIX_RANK");
  }
  throw Error(ErrorKind::kConfig,
              format("{} started {}{} processes, but MPI sees one: each would run the whole job by itself",
                     launcher.name, launcher.ranks == 0 ? "at least " : "", ranks),
              launcher.knows_mpi ? fix : fix + "; to run alone unset RANK");
}

}  // namespace invar
