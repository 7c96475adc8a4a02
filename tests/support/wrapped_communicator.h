#pragma once

#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace invar {

// Passes every call on to another communicator, but lets a test step in before and after each sum, and after each
// exchange.
class WrappedCommunicator : public Communicator {
 public:
  // Called with the buffer; what it returns is called after the sum.
  using Tamper = std::function<std::function<void()>(const Tensor& buffer)>;

  explicit WrappedCommunicator(std::unique_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->size(), inner->name(), inner->job_ranks()), inner_(std::move(inner)) {}

  bool adds_in_rank_order() const override { return inner_->adds_in_rank_order(); }
  void tamper_with_all_reduce(Tamper tamper) { tamper_ = std::move(tamper); }
  // Called after each sum with the terms that this rank gave (a copy) and what it got.
  using AfterScatter = std::function<void(const std::vector<float>& sent, int64_t own_begin, const Tensor& received)>;
  void tamper_with_reduce_scatter(AfterScatter tamper) { after_scatter_ = std::move(tamper); }

  // Called after each all_to_all or exchange with what this rank got.
  using AfterExchange = std::function<void(const Tensor& received)>;
  void tamper_with_all_to_all(AfterExchange tamper) { after_exchange_ = std::move(tamper); }

  // The same in groups that are formed out of this one.
  void tamper_with_all_to_all_of_parts(AfterExchange tamper) { after_exchange_of_parts_ = std::move(tamper); }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> part = inner_->split(color, key, std::move(name));
    if (!after_exchange_of_parts_) return part;
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(part));
    wrapped->tamper_with_all_to_all(after_exchange_of_parts_);
    return wrapped;
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
    std::vector<float> sent;
    if (after_scatter_) sent.assign(send.data<float>(), send.data<float>() + send.numel());
    inner_->reduce_scatter(stream, send, receive, counts, op);
    if (after_scatter_) {
      after_scatter_(sent, std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0}), receive);
    }
  }
  void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    inner_->all_to_all(stream, send, send_counts, receive, receive_counts);
    if (after_exchange_) after_exchange_(receive);
  }
  void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    inner_->exchange(stream, sends, receives);
    if (after_exchange_ && !receives.empty()) after_exchange_(receives.front().buffer);
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
  AfterScatter after_scatter_;
  AfterExchange after_exchange_;
  AfterExchange after_exchange_of_parts_;
};

}  // namespace invar
