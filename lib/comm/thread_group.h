#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

// What the thread ranks of a job share. Private to thread_communicator.cpp.
namespace invar {

// Thrown to a rank that waited for one that failed or left: never the first cause.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

// All ranks of one run_thread_ranks. The first failure ends every wait of every group.
class ThreadJob {
 public:
  // timeout: of a call that waits for other ranks.
  explicit ThreadJob(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Called in a catch block.
  void fail_with_current_exception();
  // An original exception if there is one, else that of a rank whose peer left early.
  void rethrow_if_failed();
  std::stop_token token() const { return stop_.get_token(); }

 private:
  std::chrono::milliseconds timeout_;
  std::stop_source stop_;
  std::mutex mutex_;
  std::exception_ptr cause_;
  std::exception_ptr consequence_;
};

// What one rank asks of a collective; its peers read it while the call lasts.
struct ThreadCall {
  std::string_view operation;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  int64_t elements = 0;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::span<const int64_t> counts{};  // of all_gather, reduce_scatter; to each rank in all_to_all
  std::span<const int64_t> receive_counts{};
  std::span<const Message> sends{};  // of exchange
  std::span<const Message> receives{};
  int color = 0;
  int key = 0;
};

// One group of thread ranks: where they meet, and where messages wait to be taken.
//
// A collective is meet(), then work on the peers' buffers, then finish(). A rank that waits in meet() may be released
// by a failure. finish() waits without that: between the two every rank only copies or adds, so all of them arrive, and
// none may take its buffers away earlier.
class ThreadGroup {
 public:
  struct Seat {
    std::shared_ptr<ThreadGroup> group;
    int rank = 0;
    std::vector<int> members{};  // of the new group, by their ranks in the old one
  };

  ThreadGroup(int size, std::shared_ptr<ThreadJob> job);

  // Waits until every rank has called; throws on all of them if the calls do not fit together.
  void meet(const Communicator& self, ThreadCall call);
  void finish();
  const ThreadCall& call_of(int rank) const { return calls_[static_cast<size_t>(rank)]; }

  // This rank's place in its new group; no group for a negative color.
  Seat split(const Communicator& self, int color, int key);

  // The sender waits until its message is taken: code that needs buffering would hang under MPI as well.
  void send(const Communicator& self, const Tensor& buffer, int to);
  void receive(const Communicator& self, const Tensor& buffer, int from);

  // The rank's communicator ends: whoever waits for it is released.
  void leave(int rank);

  int size() const { return static_cast<int>(calls_.size()); }

 private:
  struct Mail {
    const Tensor& buffer;
    bool taken = false;
    bool fits = true;
  };

  void arrive(std::unique_lock<std::mutex>& lock, const Communicator& self, const ThreadCall& call,
              const std::function<void()>& complete);
  // absent: for whom this rank waits.
  template <class Ready, class Gone, class Absent>
  void wait(std::unique_lock<std::mutex>& lock, const Communicator& self, std::string_view operation, Ready ready,
            Gone gone, Absent absent);
  void next_generation();
  std::string mismatch() const;
  std::string exchange_mismatch() const;
  void form_groups();
  Mail*& mail(int from, int to) { return mail_[static_cast<size_t>(from * size() + to)]; }

  std::shared_ptr<ThreadJob> job_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  int arrived_ = 0;
  std::vector<bool> here_;  // who has arrived
  int64_t generation_ = 0;
  std::vector<ThreadCall> calls_;
  std::string mismatch_;
  std::vector<Seat> seats_;
  std::vector<bool> left_;
  std::vector<Mail*> mail_;  // (size, size): from, to
};

}  // namespace invar
