#include "comm/launcher.h"

#include <map>

#include "support/catch.h"

namespace invar {
namespace {

std::optional<Launcher> launcher_in(const std::map<std::string, std::string>& variables) {
  return find_launcher([&](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

// Ranks of the launcher found, -1 for none.
int ranks_in(const std::map<std::string, std::string>& variables) {
  const auto launcher = launcher_in(variables);
  return launcher ? launcher->ranks : -1;
}

}  // namespace

TEST_CASE("a process started alone has no launcher") {
  CHECK(ranks_in({}) == -1);
  CHECK(ranks_in({{"PATH", "/usr/bin"}}) == -1);
}

TEST_CASE("the script of a batch job is not launched, though the job's size is in its environment") {
  CHECK(ranks_in({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "16"}, {"SLURM_PROCID", "0"}}) == -1);
}

TEST_CASE("launchers tell how many ranks they started") {
  CHECK(ranks_in({{"OMPI_COMM_WORLD_SIZE", "4"}, {"PMIX_RANK", "0"}}) == 4);
  CHECK(ranks_in({{"OMPI_COMM_WORLD_SIZE", "1"}}) == 1);
  CHECK(ranks_in({{"PMI_RANK", "1"}, {"PMI_SIZE", "8"}}) == 8);
  CHECK(ranks_in({{"MV2_COMM_WORLD_SIZE", "6"}}) == 6);
  CHECK(ranks_in({{"PMIX_RANK", "3"}}) == 0);
  CHECK(launcher_in({{"OMPI_COMM_WORLD_SIZE", "4"}})->name == "mpirun (Open MPI)");
}

TEST_CASE("srun is a launcher with PMI, or with several tasks even without") {
  const auto step = launcher_in({{"SLURM_NTASKS", "16"}, {"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "16"}});
  REQUIRE(step);
  CHECK(step->ranks == 16);  // MPI decides whether it is one job
  CHECK(step->name == "srun");
  CHECK(ranks_in({{"SLURM_NTASKS", "16"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}) == -1);
  CHECK(ranks_in({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}}) == 1);
}

TEST_CASE("mpirun inside a Slurm job goes before the step of its daemons") {
  CHECK(ranks_in({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"OMPI_COMM_WORLD_SIZE", "32"}}) == 32);
}

}  // namespace invar
