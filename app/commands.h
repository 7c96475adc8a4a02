#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_communicator.h"
#include "config/config.h"
#include "core/cores.h"
#include "device/stream.h"

namespace invar::app {

// Subcommands. Each returns an exit code or throws Error; main turns errors into messages and codes.

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  int fake_world = 0;  // > 0: time rank 0 of a job of so many, whose other ranks do not exist
};
int train(const TrainArguments& arguments, MpiSession& session);

// The exit code of a run that stopped early with a checkpoint to go on from.
inline constexpr int kRestartMe = 75;

// From now on SIGUSR1, SIGUSR2 and SIGTERM only store their number where this points: the run saves and ends. Called
// before anything else, so that none comes too early; they are unblocked, as a launcher may have blocked them until
// now.
const volatile std::sig_atomic_t* catch_stop_signals();
// They end the process again, at once, unless whoever started it has it ignore them.
void release_stop_signals();
// The same, and one that came before ends it now: there will be nothing to save.
void heed_stop_signals();

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;
  int world = 1;
};
int plan(const PlanArguments& arguments, MpiSession& session);

struct ParityArguments {
  std::string case_dir;
  std::vector<std::string> overrides;
  int thread_ranks = 0;  // > 0: that many ranks as threads of this process
  bool matrix = false;   // every layout up to 8 thread ranks
  bool poison_weights = false;
};
int parity(const ParityArguments& arguments, MpiSession& session);

// Exit code 1 if anything lies outside its band or is on one side only.
struct CompareArguments {
  std::string a;
  std::string b;
  std::optional<double> atol;
  std::optional<double> rtol;
  std::optional<double> norm_rtol;  // of grad_norm in metrics; rtol unless given
  bool exact = false;               // bit by bit
  bool all = false;                 // list every tensor
};
int compare(const CompareArguments& arguments, MpiSession& session);

// What a checkpoint holds. `path`: a checkpoint, or a folder of them, of which the latest.
struct InspectArguments {
  std::string path;
  bool verify = false;   // read everything, check every sum
  bool tensors = false;  // list them
};
int inspect(const InspectArguments& arguments, MpiSession& session);

// A checkpoint's weights as a Hugging Face folder. Streams, by one rank alone.
struct ExportArguments {
  std::string path;
  std::string folder;
  std::string dtype;  // fp32 or bf16; empty: numerics.precision of the run
};
int export_checkpoint(const ExportArguments& arguments, MpiSession& session);

// A Hugging Face folder as a checkpoint of step 0 without moments. Streams, by one rank alone.
struct ImportArguments {
  std::string hf_folder;
  std::string checkpoints;  // a new folder of checkpoints
};
int import_weights(const ImportArguments& arguments, MpiSession& session);

// Validation loss of a checkpoint, at any layout, with the config it was saved with under the overrides.
struct EvalArguments {
  std::string path;
  std::vector<std::string> overrides;
};
int eval(const EvalArguments& arguments, MpiSession& session);

// Proves on this machine that invariant numerics hold. Exit code 1 if a check fails. In one process.
struct SelftestArguments {
  std::vector<std::string> overrides;  // device=...
  int64_t steps = 3;                   // of each training
};
int selftest(const SelftestArguments& arguments, MpiSession& session);

// A failure of the set-up, on which all ranks have agreed: this rank reports it, ...
struct SetupError {
  Error error;
};
// ... and the others end with its code.
struct ReportedElsewhere {
  int exit_code;
};

// What a library threw, as an error of ours: of memory that the host did not give, with how much there is.
Error as_error(const std::exception& error);

// Runs a part of the set-up that may fail on some ranks only. If any rank failed, the lowest one that did throws
// SetupError and the others ReportedElsewhere: one message, no hang. WaitFailed is thrown on: ranks
// that do not come agree on nothing. Collective over the world.
void together(Communicator& world, const std::function<void()>& part);

// Cores of a set that a container's quota leaves.
int usable_cores(const CoreSet& cores);
// Threads for one rank: OMP_NUM_THREADS, else the cores that the host's ranks may use, shared among them.
int threads_per_rank(int ranks_on_host, int cores_of_host = usable_cores(bound_cores()));
// What is wrong with so many threads for each rank of a host, and the number to set; empty if nothing is.
std::string too_many_threads(int threads, int ranks, int cores);

}  // namespace invar::app
