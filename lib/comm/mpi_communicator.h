#pragma once

#include "comm/communicator.h"

namespace invar {

// MPI for the life of the process: constructed once by main before anything else, it finalises when destroyed.
// Not initialised when the process was started alone (no launcher in the environment): world is then a self
// communicator.
class MpiSession {
 public:
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  Communicator& world() { return *world_; }
  // Rank and size among the processes of this host.
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  // Ends every process of the job with this exit code. Does not return.
  [[noreturn]] void abort(int exit_code);

 private:
  bool initialised_ = false;
  int local_rank_ = 0;
  int local_size_ = 1;
  std::unique_ptr<Communicator> world_;
};

}  // namespace invar
