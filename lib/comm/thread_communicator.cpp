#include "comm/thread_communicator.h"

#include <cstring>
#include <thread>
#include <vector>

#include "comm/checks.h"
#include "comm/reduction.h"
#include "comm/thread_group.h"

namespace invar {
namespace {

// out[i] = elements `first + i` of all ranks' send buffers, combined in ascending rank order. out may be this rank's
// own part of a send buffer: nobody else reads that part.
void reduce_part(const ThreadGroup& group, const ThreadCall& call, int64_t first, int64_t count, std::byte* out) {
  if (count == 0) return;
  std::vector<const std::byte*> terms;
  for (int rank = 0; rank < group.size(); ++rank) {
    terms.push_back(group.call_of(rank).send + first * size_of(call.dtype));
  }
  combine_terms(call.dtype, call.op, terms, count, out);
}

void copy_elements(std::byte* to, const std::byte* from, int64_t count, DType dtype) {
  if (count > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(count * size_of(dtype)));
}

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(int rank, std::shared_ptr<ThreadGroup> group, std::string name, std::vector<int> job_ranks = {})
      : Communicator(rank, group->size(), std::move(name), std::move(job_ranks)), group_(std::move(group)) {}
  ~ThreadCommunicator() override { group_->leave(rank()); }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    ThreadGroup::Seat seat = group_->split(*this, color, key);
    if (!seat.group) return nullptr;
    for (int& member : seat.members) member = job_rank(member);
    return std::make_unique<ThreadCommunicator>(seat.rank, seat.group, std::move(name), std::move(seat.members));
  }

  // Each rank combines one part and writes it into every buffer: nobody else touches that part.
  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp op) override {
    check_all_reduce(*this, buffer);
    if (!moves_host_bytes(*this, "all_reduce", buffer)) return;
    const ThreadCall call = call_on("all_reduce", buffer, buffer, buffer.numel(), op);
    group_->meet(*this, call);
    const Range part = part_of(buffer.numel(), size(), rank());
    const int64_t offset = part.begin * size_of(call.dtype);
    reduce_part(*group_, call, part.begin, part.size(), call.receive + offset);
    for (int r = 0; r < size(); ++r) {
      copy_elements(group_->call_of(r).receive + offset, call.receive + offset, part.size(), call.dtype);
    }
    group_->finish();
  }

  void all_gather(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts) override {
    check_all_gather(*this, send, receive, counts);
    if (!moves_host_bytes(*this, "all_gather", send)) return;
    ThreadCall call = call_on("all_gather", send, receive, receive.numel());
    call.counts = counts;
    group_->meet(*this, call);
    for (int r = 0; r < size(); ++r) {
      copy_elements(call.receive + offset_of(counts, r) * size_of(call.dtype), group_->call_of(r).send,
                    counts[static_cast<size_t>(r)], call.dtype);
    }
    group_->finish();
  }

  void reduce_scatter(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) override {
    check_reduce_scatter(*this, send, receive, counts);
    if (!moves_host_bytes(*this, "reduce_scatter", send)) return;
    ThreadCall call = call_on("reduce_scatter", send, receive, send.numel(), op);
    call.counts = counts;
    group_->meet(*this, call);
    reduce_part(*group_, call, offset_of(counts, rank()), receive.numel(), call.receive);
    group_->finish();
  }

  void all_to_all(const Stream&, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    check_all_to_all(*this, send, send_counts, receive, receive_counts);
    if (!moves_host_bytes(*this, "all_to_all", send)) return;
    ThreadCall call = call_on("all_to_all", send, receive, send.numel());
    call.counts = send_counts;
    call.receive_counts = receive_counts;
    group_->meet(*this, call);
    for (int r = 0; r < size(); ++r) {
      const ThreadCall& peer = group_->call_of(r);
      copy_elements(call.receive + offset_of(receive_counts, r) * size_of(call.dtype),
                    peer.send + offset_of(peer.counts, rank()) * size_of(call.dtype),
                    receive_counts[static_cast<size_t>(r)], call.dtype);
    }
    group_->finish();
  }

  void exchange(const Stream&, std::span<const Message> sends, std::span<const Message> receives) override {
    check_exchange(*this, sends, receives);
    ThreadCall call{.operation = "exchange", .sends = sends, .receives = receives};
    for (const std::span<const Message> messages : {sends, receives}) {
      for (const Message& message : messages) {
        call.dtype = message.buffer.dtype();
        if (!moves_host_bytes(*this, "exchange", message.buffer)) return;
      }
    }
    group_->meet(*this, call);
    std::vector<size_t> next(static_cast<size_t>(size()));  // of a peer's sends, that to look at
    for (const Message& message : receives) {
      const std::span<const Message> sent = group_->call_of(message.peer).sends;
      size_t& i = next[static_cast<size_t>(message.peer)];
      while (sent[i].peer != rank()) ++i;
      copy_elements(static_cast<std::byte*>(message.buffer.raw()), static_cast<const std::byte*>(sent[i].buffer.raw()),
                    message.buffer.numel(), message.buffer.dtype());
      ++i;
    }
    group_->finish();
  }

  void broadcast(const Stream&, const Tensor& buffer, int root) override {
    check_broadcast(*this, buffer, root);
    if (!moves_host_bytes(*this, "broadcast", buffer)) return;
    ThreadCall call = call_on("broadcast", buffer, buffer, buffer.numel());
    call.root = root;
    group_->meet(*this, call);
    copy_elements(call.receive, group_->call_of(root).send, call.elements, call.dtype);
    group_->finish();
  }

  void send(const Stream&, const Tensor& buffer, int to) override {
    check_point_to_point(*this, "send", buffer, to);
    if (moves_host_bytes(*this, "send", buffer)) group_->send(*this, buffer, to);
  }

  void receive(const Stream&, const Tensor& buffer, int from) override {
    check_point_to_point(*this, "receive", buffer, from);
    if (moves_host_bytes(*this, "receive", buffer)) group_->receive(*this, buffer, from);
  }

  void barrier() override { group_->meet(*this, ThreadCall{.operation = "barrier"}); }

 private:
  static ThreadCall call_on(std::string_view operation, const Tensor& send, const Tensor& receive, int64_t elements,
                            ReduceOp op = ReduceOp::kSum) {
    return {.operation = operation,
            .dtype = send.dtype(),
            .op = op,
            .elements = elements,
            .send = static_cast<const std::byte*>(send.raw()),
            .receive = static_cast<std::byte*>(receive.raw())};
  }

  std::shared_ptr<ThreadGroup> group_;
};

}  // namespace

void run_thread_ranks(int size, const std::function<void(Communicator& world)>& body,
                      std::chrono::milliseconds timeout) {
  INVAR_CHECK(size >= 1, "{} ranks", size);
  const auto job = std::make_shared<ThreadJob>(timeout);
  const auto group = std::make_shared<ThreadGroup>(size, job);
  const auto run_rank = [&](int rank) {
    try {
      ThreadCommunicator world(rank, group, "world");
      body(world);
    } catch (...) {
      job->fail_with_current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
    } catch (...) {
      job->fail_with_current_exception();  // no more threads to be had: release those that run
    }
  }
  job->rethrow_if_failed();
}

}  // namespace invar
