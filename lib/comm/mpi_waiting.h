#pragma once

// Without the C++ bindings that MPI itself has removed.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <chrono>
#include <functional>
#include <list>
#include <string>

#include "comm/checks.h"

// How the ranks of an MPI job wait for each other. Private to mpi_communicator.cpp.
namespace invar {

// Tags of MPI_COMM_WORLD, in which nothing else is sent.
inline constexpr int kEndTag = 1;     // this rank ends the job
inline constexpr int kAskTag = 2;     // do you wait too? The text is the number of the question
inline constexpr int kAnswerTag = 3;  // yes: the number, a blank and the call

// Of one process, in its main thread, which is the only one that MPI knows.
class MpiWaiting {
 public:
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Until the request of the group's call is done; its code. Leaves the core to others, and answers ranks that ask.
  // After the timeout it asks all ranks whether they wait too: WaitFailed that names those that do not.
  int wait(const Communicator& group, std::string_view operation, MPI_Request& request,
           MPI_Status* status = MPI_STATUS_IGNORE);
  // Tells the ranks that have asked that this one waits, and in which call.
  void answer(const std::function<std::string()>& call);

 private:
  using Clock = std::chrono::steady_clock;

  static std::string call_of(const Communicator& group, std::string_view operation);
  // Who does not answer, for a person; nothing if the call is over after all.
  std::string ask(const std::string& call, const std::function<bool()>& is_over);

  std::chrono::milliseconds timeout_ = kCollectiveTimeout;
  int64_t asked_ = 0;            // questions of this rank
  std::list<std::string> sent_;  // texts that MPI may still read
};

}  // namespace invar
