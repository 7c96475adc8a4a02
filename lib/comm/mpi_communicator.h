#pragma once

#include <chrono>
#include <limits>
#include <memory>

#include "comm/communicator.h"
#include "core/cores.h"

namespace invar {

class MpiWaiting;

// MPI for the life of the process: constructed once by main before anything else, it finalises when destroyed.
// Not initialised when the process was started alone (no launcher in the environment): world is then a self
// communicator.
class MpiSession {
 public:
  // Throws Error{kConfig} if a launcher started several processes that MPI does not see as one job.
  MpiSession(int* argc, char*** argv);
  // Finalises, which waits for the other ranks. While an exception unwinds main it does not: they may be waiting for
  // this rank in a collective. The launcher ends them when this process returns its exit code without finalising.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  Communicator& world() { return *world_; }
  // Rank and size among the processes of this host.
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  // That those are bound to, all together.
  const CoreSet& local_cores() const { return local_cores_; }
  // From now on a call of any group that waits longer for its peers is an Error{kFault}, which names the ranks that do
  // not come. Ten minutes until then.
  void set_timeout(std::chrono::milliseconds timeout);
  // A barrier of all ranks. One that is idle until then waits for hours if need be, and takes no CPU time. The others
  // wait as in any other call.
  void meet_at_the_end(bool idle);
  // Tells the ranks above this one, as far as they can be told, that it ends the job; whether one below has said so.
  void announce_end() const;
  bool end_is_announced() const;
  // Ends every process of the job with this exit code. Does not return.
  [[noreturn]] void abort(int exit_code);

  // Elements that one MPI call can move: its counts are ints.
  static constexpr int64_t kLargestPiece = std::numeric_limits<int>::max();
  // Another communicator over all ranks (collective) that moves larger tensors in pieces of at most `largest_piece`.
  // Tests set it small, so that what takes 4 GB tensors otherwise is tried with small ones.
  std::unique_ptr<Communicator> make_world(int64_t largest_piece = kLargestPiece) const;

 private:
  bool initialised_ = false;
  int local_rank_ = 0;
  int local_size_ = 1;
  CoreSet local_cores_ = bound_cores();
  std::shared_ptr<MpiWaiting> waiting_;
  std::unique_ptr<Communicator> world_;
};

}  // namespace invar
