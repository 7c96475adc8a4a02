#include "comm/fake_communicator.h"

#include <algorithm>

#include "comm/checks.h"
#include "device/device.h"

namespace invar {
namespace {

Tensor elements_of(const Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.view({tensor.numel()}).rows(begin, begin + count);
}

// The elements of `from` over and over.
void fill(const Stream& stream, const Tensor& from, const Tensor& to) {
  if (from.empty() || from.raw() == to.raw()) return;  // of nothing there is nothing to give
  for (int64_t begin = 0; begin < to.numel(); begin += from.numel()) {
    const int64_t count = std::min(from.numel(), to.numel() - begin);
    copy_across(stream, elements_of(from, 0, count), elements_of(to, begin, count));
  }
}

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(int rank, int size, std::string name) : Communicator(rank, size, std::move(name)) {
    INVAR_CHECK(0 <= rank && rank < size, "rank {} of {}", rank, size);
  }

  std::unique_ptr<Communicator> split(int, int, std::string name) override {
    fail_collective(*this, "split", format("a fake group has no peers to agree on group '{}' with", name));
  }

  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp) override { check_all_reduce(*this, buffer); }

  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) override {
    check_all_gather(*this, send, receive, counts);
    fill_parts(stream, send, receive, counts);
  }

  void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp) override {
    check_reduce_scatter(*this, send, receive, counts);
    fill(stream, elements_of(send, offset_of(counts, rank()), receive.numel()), receive);
  }

  void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    check_all_to_all(*this, send, send_counts, receive, receive_counts);
    fill_parts(stream, send, receive, receive_counts);
  }

  void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    check_exchange(*this, sends, receives);
    const auto given = std::ranges::find_if(sends, [](const Message& message) { return !message.buffer.empty(); });
    if (given == sends.end()) return;
    for (const Message& message : receives) fill(stream, given->buffer, message.buffer);
  }

  void broadcast(const Stream&, const Tensor& buffer, int root) override { check_broadcast(*this, buffer, root); }
  void send(const Stream&, const Tensor& buffer, int to) override { check_point_to_point(*this, "send", buffer, to); }
  void receive(const Stream&, const Tensor& buffer, int from) override {
    check_point_to_point(*this, "receive", buffer, from);
  }
  void barrier() override {}

 private:
  void fill_parts(const Stream& stream, const Tensor& from, const Tensor& to, std::span<const int64_t> counts) const {
    for (int r = 0; r < size(); ++r) {
      fill(stream, from, elements_of(to, offset_of(counts, r), counts[static_cast<size_t>(r)]));
    }
  }
};

}  // namespace

std::unique_ptr<Communicator> make_fake_communicator(int rank, int size, std::string name) {
  return std::make_unique<FakeCommunicator>(rank, size, std::move(name));
}

}  // namespace invar
