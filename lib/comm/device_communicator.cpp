#include "comm/device_communicator.h"

#include "comm/checks.h"
#include "device/device.h"

namespace invar {
namespace {

bool on_gpu(const Tensor& tensor) {
  return tensor.device() == DeviceType::kCuda;
}

// In a group of one.
void copy(const Stream& stream, const Tensor& send, const Tensor& receive) {
  if (send.raw() != receive.raw()) copy_across(stream, send, receive);
}

}  // namespace

void DeviceCommunicator::all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) {
  if (!on_gpu(buffer)) return host_->all_reduce(stream, buffer, op);
  check_all_reduce(*this, buffer);
  if (size() > 1 && !buffer.empty()) move_all_reduce(stream, buffer, op);
}

void DeviceCommunicator::all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                                    std::span<const int64_t> counts) {
  if (!on_gpu(receive)) return host_->all_gather(stream, send, receive, counts);
  check_all_gather(*this, send, receive, counts);
  if (size() == 1) return copy(stream, send, receive);
  if (!receive.empty()) move_all_gather(stream, send, receive, counts);
}

void DeviceCommunicator::reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive,
                                        std::span<const int64_t> counts, ReduceOp op) {
  if (!on_gpu(send)) return host_->reduce_scatter(stream, send, receive, counts, op);
  check_reduce_scatter(*this, send, receive, counts);
  if (size() == 1) return copy(stream, send, receive);
  if (!send.empty()) move_reduce_scatter(stream, send, receive, counts, op);
}

void DeviceCommunicator::all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts,
                                    const Tensor& receive, std::span<const int64_t> receive_counts) {
  if (!on_gpu(send)) return host_->all_to_all(stream, send, send_counts, receive, receive_counts);
  check_all_to_all(*this, send, send_counts, receive, receive_counts);
  if (size() == 1) return copy(stream, send, receive);
  move_all_to_all(stream, send, send_counts, receive, receive_counts);
}

void DeviceCommunicator::exchange(const Stream& stream, std::span<const Message> sends,
                                  std::span<const Message> receives) {
  // Without messages by the stream: all ranks must come, for a group connects in its first call.
  const std::span<const Message> some = sends.empty() ? receives : sends;
  if (some.empty() ? stream.device() != DeviceType::kCuda : !on_gpu(some.front().buffer)) {
    return host_->exchange(stream, sends, receives);
  }
  check_exchange(*this, sends, receives);
  move_exchange(stream, sends, receives);
}

void DeviceCommunicator::broadcast(const Stream& stream, const Tensor& buffer, int root) {
  if (!on_gpu(buffer)) return host_->broadcast(stream, buffer, root);
  check_broadcast(*this, buffer, root);
  if (size() > 1 && !buffer.empty()) move_broadcast(stream, buffer, root);
}

void DeviceCommunicator::send(const Stream& stream, const Tensor& buffer, int to) {
  if (!on_gpu(buffer)) return host_->send(stream, buffer, to);
  check_point_to_point(*this, "send", buffer, to);
  move_send(stream, buffer, to);
}

void DeviceCommunicator::receive(const Stream& stream, const Tensor& buffer, int from) {
  if (!on_gpu(buffer)) return host_->receive(stream, buffer, from);
  check_point_to_point(*this, "receive", buffer, from);
  move_receive(stream, buffer, from);
}

namespace {

// A tensor's bytes in host memory.
class HostCopy {
 public:
  explicit HostCopy(const Tensor& like)
      : bytes_(static_cast<size_t>(like.bytes())), view_(bytes_.data(), like.dtype(), DeviceType::kCpu, like.shape()) {}
  HostCopy(const Stream& stream, const Tensor& of) : HostCopy(of) { copy_across(stream, of, view_); }
  const Tensor& tensor() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  Tensor view_;
};

class StagedCommunicator final : public DeviceCommunicator {
 public:
  explicit StagedCommunicator(std::shared_ptr<Communicator> host) : DeviceCommunicator(std::move(host)) {}

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> part = host().split(color, key, std::move(name));
    return part == nullptr ? nullptr : make_staged_communicator(std::move(part));
  }

 private:
  void move_all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) override {
    const HostCopy copy(stream, buffer);
    host().all_reduce(stream, copy.tensor(), op);
    copy_across(stream, copy.tensor(), buffer);
  }
  void move_all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                       std::span<const int64_t> counts) override {
    const HostCopy from(stream, send), to(receive);
    host().all_gather(stream, from.tensor(), to.tensor(), counts);
    copy_across(stream, to.tensor(), receive);
  }
  void move_reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive,
                           std::span<const int64_t> counts, ReduceOp op) override {
    const HostCopy from(stream, send), to(receive);
    host().reduce_scatter(stream, from.tensor(), to.tensor(), counts, op);
    copy_across(stream, to.tensor(), receive);
  }
  void move_all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts,
                       const Tensor& receive, std::span<const int64_t> receive_counts) override {
    const HostCopy from(stream, send), to(receive);
    host().all_to_all(stream, from.tensor(), send_counts, to.tensor(), receive_counts);
    copy_across(stream, to.tensor(), receive);
  }
  void move_exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    std::vector<HostCopy> copies;
    std::vector<Message> from, to;
    copies.reserve(sends.size() + receives.size());
    for (const Message& message : sends) {
      from.push_back({copies.emplace_back(stream, message.buffer).tensor(), message.peer});
    }
    for (const Message& message : receives) to.push_back({copies.emplace_back(message.buffer).tensor(), message.peer});
    host().exchange(stream, from, to);
    for (size_t i = 0; i < to.size(); ++i) copy_across(stream, to[i].buffer, receives[i].buffer);
  }
  void move_broadcast(const Stream& stream, const Tensor& buffer, int root) override {
    const HostCopy copy(stream, buffer);
    host().broadcast(stream, copy.tensor(), root);
    copy_across(stream, copy.tensor(), buffer);
  }
  void move_send(const Stream& stream, const Tensor& buffer, int to) override {
    host().send(stream, HostCopy(stream, buffer).tensor(), to);
  }
  void move_receive(const Stream& stream, const Tensor& buffer, int from) override {
    const HostCopy copy(buffer);
    host().receive(stream, copy.tensor(), from);
    copy_across(stream, copy.tensor(), buffer);
  }
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(std::shared_ptr<Communicator> host) {
  return std::make_unique<StagedCommunicator>(std::move(host));
}

}  // namespace invar
