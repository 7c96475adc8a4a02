#pragma once

#include <functional>
#include <utility>

#include "comm/communicator.h"

namespace invar {

// Passes every call on to another communicator, but lets a test step in before and after each all_reduce.
class WrappedCommunicator : public Communicator {
 public:
  // Called with the buffer; what it returns is called after the sum.
  using Tamper = std::function<std::function<void()>(const Tensor& buffer)>;

  explicit WrappedCommunicator(std::unique_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->size(), inner->name()), inner_(std::move(inner)) {}

  void tamper_with_all_reduce(Tamper tamper) { tamper_ = std::move(tamper); }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    return inner_->split(color, key, std::move(name));
  }
  void all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) override {
    const std::function<void()> undo = tamper_ ? tamper_(buffer) : std::function<void()>();
    inner_->all_reduce(stream, buffer, op);
    if (undo) undo();
  }
  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) override {
    inner_->all_gather(stream, send, receive, counts);
  }
  void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) override {
    inner_->reduce_scatter(stream, send, receive, counts, op);
  }
  void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    inner_->all_to_all(stream, send, send_counts, receive, receive_counts);
  }
  void broadcast(const Stream& stream, const Tensor& buffer, int root) override {
    inner_->broadcast(stream, buffer, root);
  }
  void send(const Stream& stream, const Tensor& buffer, int to) override { inner_->send(stream, buffer, to); }
  void receive(const Stream& stream, const Tensor& buffer, int from) override { inner_->receive(stream, buffer, from); }
  void barrier() override { inner_->barrier(); }

 private:
  std::unique_ptr<Communicator> inner_;
  Tamper tamper_;
};

}  // namespace invar
