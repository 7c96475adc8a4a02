#include "comm/thread_group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "comm/checks.h"

namespace invar {
namespace {

std::string describe(const ThreadCall& call) {
  if (call.operation == "barrier" || call.operation == "split") return std::string(call.operation);
  std::string text = format("{} of {} {}", call.operation, call.elements, name_of(call.dtype));
  if (call.operation == "broadcast") text += format(" from rank {}", call.root);
  if (call.operation == "all_reduce" || call.operation == "reduce_scatter") {
    text += call.op == ReduceOp::kSum ? " (sum)" : call.op == ReduceOp::kMax ? " (max)" : " (min)";
  }
  return text;
}

bool fit_together(const ThreadCall& a, const ThreadCall& b) {
  const auto facts = [](const ThreadCall& call) {
    return std::tie(call.operation, call.dtype, call.op, call.root, call.elements);
  };
  return facts(a) == facts(b) && std::ranges::equal(a.counts, b.counts);
}

}  // namespace

void ThreadJob::fail_with_current_exception() {
  {
    const std::lock_guard lock(mutex_);
    try {
      throw;
    } catch (const PeerFailed&) {
      if (!consequence_) consequence_ = std::current_exception();
    } catch (...) {
      if (!cause_) cause_ = std::current_exception();
    }
  }
  stop_.request_stop();
}

void ThreadJob::rethrow_if_failed() {
  const std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
  if (consequence_) std::rethrow_exception(consequence_);
}

ThreadGroup::ThreadGroup(int size, std::shared_ptr<ThreadJob> job)
    : job_(std::move(job)),
      here_(static_cast<size_t>(size), false),
      calls_(static_cast<size_t>(size)),
      seats_(static_cast<size_t>(size)),
      left_(static_cast<size_t>(size), false),
      mail_(static_cast<size_t>(size * size), nullptr) {}

template <class Ready, class Gone, class Absent>
void ThreadGroup::wait(std::unique_lock<std::mutex>& lock, const Communicator& self, std::string_view operation,
                       Ready ready, Gone gone, Absent absent) {
  const auto end = [&] { return ready() || gone(); };
  const bool in_time = changed_.wait_for(lock, job_->token(), job_->timeout(), end);
  if (ready()) return;
  if (!in_time && !job_->token().stop_requested()) {
    fail_waiting(self, operation, job_->timeout(), list_ranks(absent()) + " did not come",
                 "a rank, which is a thread here, hangs or computes for longer than the others wait: try fewer ranks");
  }
  throw PeerFailed(ErrorKind::kFault,
                   format("{} in group '{}' (rank {} of {}): another rank failed or ended before it took part",
                          operation, self.name(), self.rank(), self.size()));
}

void ThreadGroup::next_generation() {
  arrived_ = 0;
  std::fill(here_.begin(), here_.end(), false);
  ++generation_;
  changed_.notify_all();
}

// The last rank to arrive runs complete() and lets the others go.
void ThreadGroup::arrive(std::unique_lock<std::mutex>& lock, const Communicator& self, const ThreadCall& call,
                         const std::function<void()>& complete) {
  calls_[static_cast<size_t>(self.rank())] = call;
  if (arrived_ + 1 == size()) {
    complete();
    next_generation();
    return;
  }
  ++arrived_;
  here_[static_cast<size_t>(self.rank())] = true;
  try {
    const auto someone_left = [&] { return std::ranges::find(left_, true) != left_.end(); };
    const auto absent = [&] {
      std::vector<int> ranks;
      for (int rank = 0; rank < size(); ++rank) {
        if (!here_[static_cast<size_t>(rank)]) ranks.push_back(rank);
      }
      return ranks;
    };
    wait(
        lock, self, call.operation, [&, mine = generation_] { return generation_ != mine; }, someone_left, absent);
  } catch (...) {
    --arrived_;  // or a later arrival would find the group complete and read this rank's buffers
    here_[static_cast<size_t>(self.rank())] = false;
    throw;
  }
}

void ThreadGroup::meet(const Communicator& self, ThreadCall call) {
  std::unique_lock lock(mutex_);
  arrive(lock, self, call, [&] { mismatch_ = mismatch(); });
  if (!mismatch_.empty()) fail_collective(self, call.operation, mismatch_);
}

void ThreadGroup::finish() {
  std::unique_lock lock(mutex_);
  if (++arrived_ == size()) return next_generation();
  changed_.wait(lock, [&, mine = generation_] { return generation_ != mine; });
}

std::string ThreadGroup::mismatch() const {
  const auto is_exchange = [](const ThreadCall& call) { return call.operation == "exchange"; };
  if (std::ranges::all_of(calls_, is_exchange)) return exchange_mismatch();
  const auto differ = [&](int a, int b) {
    return format("rank {} calls {}, rank {} calls {}{}", a, describe(call_of(a)), b, describe(call_of(b)),
                  describe(call_of(a)) == describe(call_of(b)) ? " with other counts" : "");
  };
  for (int rank = 1; rank < size(); ++rank) {
    const bool counts_differ = call_of(0).operation == "all_to_all" && call_of(rank).operation == "all_to_all";
    if (counts_differ ? call_of(0).dtype != call_of(rank).dtype : !fit_together(call_of(0), call_of(rank))) {
      return differ(0, rank);
    }
  }
  if (call_of(0).operation != "all_to_all") return "";
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      const int64_t sent = call_of(from).counts[static_cast<size_t>(to)];
      const int64_t wanted = call_of(to).receive_counts[static_cast<size_t>(from)];
      if (sent != wanted) return format("rank {} sends {} to rank {}, which expects {}", from, sent, to, wanted);
    }
  }
  return "";
}

std::string ThreadGroup::exchange_mismatch() const {
  const auto between = [](std::span<const Message> messages, int peer) {
    std::vector<std::pair<DType, int64_t>> kinds;
    for (const Message& message : messages) {
      if (message.peer == peer) kinds.emplace_back(message.buffer.dtype(), message.buffer.numel());
    }
    return kinds;
  };
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      const auto sent = between(call_of(from).sends, to);
      const auto wanted = between(call_of(to).receives, from);
      if (sent != wanted) {
        return format("rank {} sends {} messages to rank {}, which expects {}, or of other kinds", from, sent.size(),
                      to, wanted.size());
      }
    }
  }
  return "";
}

ThreadGroup::Seat ThreadGroup::split(const Communicator& self, int color, int key) {
  std::unique_lock lock(mutex_);
  ThreadCall call{.operation = "split", .color = color, .key = key};
  arrive(lock, self, call, [&] {
    mismatch_ = mismatch();
    if (mismatch_.empty()) form_groups();
  });
  if (!mismatch_.empty()) fail_collective(self, call.operation, mismatch_);
  return std::exchange(seats_[static_cast<size_t>(self.rank())], {});
}

void ThreadGroup::form_groups() {
  std::vector<int> order(static_cast<size_t>(size()));
  std::iota(order.begin(), order.end(), 0);
  const auto place = [&](int rank) { return std::tuple(call_of(rank).color, call_of(rank).key, rank); };
  std::ranges::sort(order, {}, place);
  for (auto first = order.begin(); first != order.end();) {
    const int color = call_of(*first).color;
    const auto last = std::find_if(first, order.end(), [&](int rank) { return call_of(rank).color != color; });
    const auto group = color < 0 ? nullptr : std::make_shared<ThreadGroup>(static_cast<int>(last - first), job_);
    for (auto it = first; it != last; ++it) {
      seats_[static_cast<size_t>(*it)] = {group, static_cast<int>(it - first), {first, last}};
    }
    first = last;
  }
}

void ThreadGroup::send(const Communicator& self, const Tensor& buffer, int to) {
  std::unique_lock lock(mutex_);
  Mail message{.buffer = buffer};
  mail(self.rank(), to) = &message;
  changed_.notify_all();
  try {
    wait(
        lock, self, "send", [&] { return message.taken; }, [&] { return left_[static_cast<size_t>(to)]; },
        [to] { return std::vector<int>{to}; });
  } catch (...) {
    mail(self.rank(), to) = nullptr;
    throw;
  }
  if (!message.fits) fail_collective(self, "send", format("rank {} expected another size or dtype", to));
}

void ThreadGroup::receive(const Communicator& self, const Tensor& buffer, int from) {
  std::unique_lock lock(mutex_);
  Mail*& slot = mail(from, self.rank());
  wait(
      lock, self, "receive", [&] { return slot != nullptr; }, [&] { return left_[static_cast<size_t>(from)]; },
      [from] { return std::vector<int>{from}; });
  Mail& message = *std::exchange(slot, nullptr);
  message.fits = message.buffer.dtype() == buffer.dtype() && message.buffer.numel() == buffer.numel();
  message.taken = true;
  const std::string sent = message.buffer.describe();
  if (message.fits && !buffer.empty()) {
    std::memcpy(buffer.raw(), message.buffer.raw(), static_cast<size_t>(buffer.bytes()));
  }
  const bool fits = message.fits;
  changed_.notify_all();
  if (!fits) fail_collective(self, "receive", format("rank {} sends {}, expected {}", from, sent, buffer.describe()));
}

void ThreadGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  left_[static_cast<size_t>(rank)] = true;
  changed_.notify_all();
}

}  // namespace invar
