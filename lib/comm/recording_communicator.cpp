#include "comm/recording_communicator.h"

#include "comm/checks.h"
#include "comm/reduction.h"

namespace invar {
namespace {

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(int rank, int size, std::string name, TrafficTable* table)
      : Communicator(rank, size, std::move(name)), table_(table) {
    INVAR_CHECK(0 <= rank && rank < size && table != nullptr, "rank {} of {}", rank, size);
  }

  std::unique_ptr<Communicator> split(int, int, std::string name) override {
    fail_collective(*this, "split", format("a recorded group has no peers to agree on group '{}' with", name));
  }

  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp) override {
    check_all_reduce(*this, buffer);
    if (buffer.numel() != 1) require_meta("all_reduce", buffer);
    // A reduce_scatter and an all_gather of parts.
    const int64_t elements = 2 * buffer.numel() - part_of(buffer.numel(), size(), rank()).size() -
                             part_of(buffer.numel(), size(), next()).size();
    record("all_reduce", elements, buffer);
  }

  // In the ring a rank passes on every part but the one that its successor gave.
  void all_gather(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts) override {
    check_all_gather(*this, send, receive, counts);
    require_meta("all_gather", send);
    record("all_gather", receive.numel() - counts[static_cast<size_t>(next())], receive);
  }

  // In the ring a rank passes on every partial sum but its own.
  void reduce_scatter(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp) override {
    check_reduce_scatter(*this, send, receive, counts);
    require_meta("reduce_scatter", send);
    record("reduce_scatter", send.numel() - receive.numel(), send);
  }

  void all_to_all(const Stream&, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    check_all_to_all(*this, send, send_counts, receive, receive_counts);
    require_meta("all_to_all", send);
    record("all_to_all", send.numel() - send_counts[static_cast<size_t>(rank())], send);
  }

  void exchange(const Stream&, std::span<const Message> sends, std::span<const Message> receives) override {
    check_exchange(*this, sends, receives);
    int64_t elements = 0;
    for (const Message& message : sends) {
      require_meta("exchange", message.buffer);
      elements += message.buffer.numel();
    }
    record("exchange", elements, sends.empty() ? Tensor() : sends.front().buffer);
  }

  // A chain that starts at the root: all but the last pass everything on.
  void broadcast(const Stream&, const Tensor& buffer, int root) override {
    check_broadcast(*this, buffer, root);
    require_meta("broadcast", buffer);
    record("broadcast", next() == root ? 0 : buffer.numel(), buffer);
  }

  void send(const Stream&, const Tensor& buffer, int to) override {
    check_point_to_point(*this, "send", buffer, to);
    require_meta("send", buffer);
    record("send", buffer.numel(), buffer);
  }

  void receive(const Stream&, const Tensor& buffer, int from) override {
    check_point_to_point(*this, "receive", buffer, from);
    require_meta("receive", buffer);
    record("receive", 0, buffer);
  }

  void barrier() override { record("barrier", 0, Tensor()); }

 private:
  int next() const { return (rank() + 1) % size(); }

  void require_meta(std::string_view operation, const Tensor& tensor) const {
    if (!tensor.is_meta()) {
      fail_collective(*this, operation,
                      format("{} is on {}; a recorded group takes meta", tensor.describe(), name_of(tensor.device())));
    }
  }

  void record(std::string_view operation, int64_t elements, const Tensor& tensor) {
    Traffic& traffic = (*table_)[format("{} {}", name(), operation)];
    traffic.group = name();
    ++traffic.calls;
    traffic.bytes += elements * size_of(tensor.dtype());
  }

  TrafficTable* table_;
};

}  // namespace

std::unique_ptr<Communicator> make_recording_communicator(int rank, int size, std::string name, TrafficTable* table) {
  return std::make_unique<RecordingCommunicator>(rank, size, std::move(name), table);
}

}  // namespace invar
