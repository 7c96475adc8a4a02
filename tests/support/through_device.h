#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "device/arena.h"
#include "device/device.h"

namespace invar {

// Runs the cases of the communicator suite, which work on host memory, in GPU memory: copies there, calls another
// communicator, copies back.
class ThroughDevice final : public Communicator {
 public:
  ThroughDevice(std::unique_ptr<Communicator> inner, Stream stream)
      : Communicator(inner->rank(), inner->size(), inner->name(), inner->job_ranks()),
        inner_(std::move(inner)),
        stream_(std::move(stream)) {}

  bool adds_in_rank_order() const override { return inner_->adds_in_rank_order(); }
  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> part = inner_->split(color, key, std::move(name));
    return part == nullptr ? nullptr : std::make_unique<ThroughDevice>(std::move(part), stream_);
  }
  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp op) override {
    const Copy on_device(stream_, buffer);
    inner_->all_reduce(stream_, on_device.tensor(), op);
    on_device.back(buffer);
  }
  void all_gather(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts) override {
    const Copy from(stream_, send), to(stream_, receive);
    inner_->all_gather(stream_, to.or_part(receive, send, from), to.tensor(), counts);
    to.back(receive);
  }
  void reduce_scatter(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) override {
    const Copy from(stream_, send), to(stream_, receive);
    const Tensor part = from.or_part(send, receive, to);
    inner_->reduce_scatter(stream_, from.tensor(), part, counts, op);
    copy_across(stream_, part, receive);
  }
  void all_to_all(const Stream&, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    const Copy from(stream_, send), to(stream_, receive);
    inner_->all_to_all(stream_, from.tensor(), send_counts, to.tensor(), receive_counts);
    to.back(receive);
  }
  void exchange(const Stream&, std::span<const Message> sends, std::span<const Message> receives) override {
    std::vector<std::unique_ptr<Copy>> copies;
    std::vector<Message> from, to;
    for (const Message& message : sends) {
      copies.push_back(std::make_unique<Copy>(stream_, message.buffer));
      from.push_back({copies.back()->tensor(), message.peer});
    }
    for (const Message& message : receives) {
      copies.push_back(std::make_unique<Copy>(stream_, message.buffer));
      to.push_back({copies.back()->tensor(), message.peer});
    }
    inner_->exchange(stream_, from, to);
    for (size_t i = 0; i < receives.size(); ++i) copies[sends.size() + i]->back(receives[i].buffer);
  }
  void broadcast(const Stream&, const Tensor& buffer, int root) override {
    const Copy on_device(stream_, buffer);
    inner_->broadcast(stream_, on_device.tensor(), root);
    on_device.back(buffer);
  }
  void send(const Stream&, const Tensor& buffer, int to) override {
    inner_->send(stream_, Copy(stream_, buffer).tensor(), to);
    synchronize(stream_);
  }
  void receive(const Stream&, const Tensor& buffer, int from) override {
    const Copy on_device(stream_, buffer);
    inner_->receive(stream_, on_device.tensor(), from);
    on_device.back(buffer);
  }
  void barrier() override { inner_->barrier(); }

 private:
  class Copy {
   public:
    Copy(const Stream& stream, const Tensor& host)
        : stream_(stream),
          arena_("copy", DeviceType::kCuda, host.bytes() + Arena::kAlignment),
          view_(arena_.allocate("copy", host.dtype(), {host.numel()})) {
      copy_across(stream, host, view_);
    }
    ~Copy() { synchronize(stream_); }  // of what still reads it
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    const Tensor& tensor() const { return view_; }
    void back(const Tensor& host) const { copy_across(stream_, view_, host); }
    // Where `part` lies inside `whole`, of which this is the copy, the same part of the copy; else the part's own copy.
    Tensor or_part(const Tensor& whole, const Tensor& part, const Copy& own) const {
      const int64_t bytes = static_cast<const std::byte*>(part.raw()) - static_cast<const std::byte*>(whole.raw());
      const int64_t begin = bytes / size_of(whole.dtype());
      const bool inside = !part.empty() && bytes >= 0 && begin + part.numel() <= whole.numel();
      return inside ? view_.rows(begin, begin + part.numel()) : own.view_;
    }

   private:
    const Stream& stream_;
    Arena arena_;
    Tensor view_;
  };

  std::unique_ptr<Communicator> inner_;
  Stream stream_;
};

}  // namespace invar
