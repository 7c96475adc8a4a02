#include "comm/self_communicator.h"

#include <cstring>

#include "comm/checks.h"

namespace invar {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(std::string name, int job_rank) : Communicator(0, 1, std::move(name), {job_rank}) {}

  std::unique_ptr<Communicator> split(int color, int /*key*/, std::string name) override {
    return color < 0 ? nullptr : make_self_communicator(std::move(name), job_rank(0));
  }

  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp) override {
    check_all_reduce(*this, buffer);
    moves_host_bytes(*this, "all_reduce", buffer);
  }

  void all_gather(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts) override {
    check_all_gather(*this, send, receive, counts);
    copy("all_gather", send, receive);
  }

  void reduce_scatter(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp) override {
    check_reduce_scatter(*this, send, receive, counts);
    copy("reduce_scatter", send, receive);
  }

  void all_to_all(const Stream&, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    check_all_to_all(*this, send, send_counts, receive, receive_counts);
    copy("all_to_all", send, receive);
  }

  void exchange(const Stream&, std::span<const Message> sends, std::span<const Message> receives) override {
    check_exchange(*this, sends, receives);  // there is no peer to name
  }

  void broadcast(const Stream&, const Tensor& buffer, int root) override {
    check_broadcast(*this, buffer, root);
    moves_host_bytes(*this, "broadcast", buffer);
  }

  // There is no peer to name: these always throw.
  void send(const Stream&, const Tensor& buffer, int to) override { check_point_to_point(*this, "send", buffer, to); }
  void receive(const Stream&, const Tensor& buffer, int from) override {
    check_point_to_point(*this, "receive", buffer, from);
  }

  void barrier() override {}

 private:
  void copy(std::string_view operation, const Tensor& send, const Tensor& receive) const {
    if (!moves_host_bytes(*this, operation, send) || send.empty() || send.raw() == receive.raw()) return;
    std::memcpy(receive.raw(), send.raw(), static_cast<size_t>(send.bytes()));
  }
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(std::string name, int job_rank) {
  return std::make_unique<SelfCommunicator>(std::move(name), job_rank);
}

}  // namespace invar
