#pragma once

#include "comm/communicator.h"

namespace invar {

// A group whose ranks exchange GPU memory in the order of the stream, and host memory, scalars above all, through a
// communicator over the same ranks. Derived classes move what is on the GPU; they are asked only in a group of several.
class DeviceCommunicator : public Communicator {
 public:
  void all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) final;
  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) final;
  void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) final;
  void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) final;
  void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) final;
  void broadcast(const Stream& stream, const Tensor& buffer, int root) final;
  void send(const Stream& stream, const Tensor& buffer, int to) final;
  void receive(const Stream& stream, const Tensor& buffer, int from) final;
  void barrier() final { host_->barrier(); }

 protected:
  explicit DeviceCommunicator(std::shared_ptr<Communicator> host)
      : Communicator(host->rank(), host->size(), host->name(), host->job_ranks()), host_(std::move(host)) {}
  Communicator& host() const { return *host_; }

 private:
  virtual void move_all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) = 0;
  virtual void move_all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                               std::span<const int64_t> counts) = 0;
  virtual void move_reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive,
                                   std::span<const int64_t> counts, ReduceOp op) = 0;
  virtual void move_all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts,
                               const Tensor& receive, std::span<const int64_t> receive_counts) = 0;
  virtual void move_exchange(const Stream& stream, std::span<const Message> sends,
                             std::span<const Message> receives) = 0;
  virtual void move_broadcast(const Stream& stream, const Tensor& buffer, int root) = 0;
  virtual void move_send(const Stream& stream, const Tensor& buffer, int to) = 0;
  virtual void move_receive(const Stream& stream, const Tensor& buffer, int from) = 0;

  std::shared_ptr<Communicator> host_;
};

// Through host memory: for a rank alone and for ranks that share a GPU, threads of one process. Bits are those of
// `host`.
std::unique_ptr<Communicator> make_staged_communicator(std::shared_ptr<Communicator> host);

}  // namespace invar
