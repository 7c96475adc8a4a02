#include "comm/launcher.h"

#include <map>

#include "support/catch.h"
#include "support/errors.h"

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

TEST_CASE("processes that MPI does not see as one job are refused by the name of what started them") {
  const auto refusal = [](const std::map<std::string, std::string>& variables, int mpi_size) {
    const auto launcher = launcher_in(variables);
    return launcher ? test::message_of(ErrorKind::kConfig, [&] { check_launcher(*launcher, mpi_size); }) : "alone";
  };
  using Variables = std::map<std::string, std::string>;
  const std::pair<Variables, std::string> kForeign[] = {
      {{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}},
       "torchrun (or what else sets RANK and WORLD_SIZE) started 4"},
      {{{"PMIX_RANK", "3"}, {"PMIX_NAMESPACE", "job"}}, "a PMIx launcher started at least 4 processes"},
      {{{"PMIX_RANK", "0"}}, "PMIX_RANK is set, but nothing else of a PMIx launcher"},
      {{{"OMPI_COMM_WORLD_RANK", "1"}}, "mpirun (Open MPI) started at least 2 processes"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, "mpirun (Open MPI) started 2 processes"},
      {{{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}}, "srun started 4 processes"},
      {{{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"PMI_RANK", "2"}}, "srun started 4 processes"}};
  for (const auto& [variables, message] : kForeign) {
    CAPTURE(message);
    CHECK(test::contains(refusal(variables, 1), message));
    CHECK(refusal(variables, 4) == "");
  }
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, 1) == "alone");
  CHECK(refusal({{"WORLD_SIZE", "8"}}, 1) == "alone");
  CHECK(refusal({{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "job"}}, 1) == "");
  CHECK(refusal({{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}},
                1) == "");
}

TEST_CASE("mpirun inside a Slurm job goes before the step of its daemons") {
  CHECK(ranks_in({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"OMPI_COMM_WORLD_SIZE", "32"}}) == 32);
}

}  // namespace invar
