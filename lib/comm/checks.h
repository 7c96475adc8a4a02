#pragma once

#include <chrono>
#include <source_location>
#include <string>
#include <string_view>

#include "comm/communicator.h"

namespace invar {

// Throws Error{kFault} "all_gather in group 'tensor' (rank 1 of 4): what".
[[noreturn]] void fail_collective(const Communicator& group, std::string_view operation, const std::string& what,
                                  std::source_location where = std::source_location::current());

// Of every call over host memory, unless comm.timeout says otherwise.
inline constexpr std::chrono::minutes kCollectiveTimeout(10);

// A call waited too long for other ranks. Whoever catches it can agree with them on nothing more.
class WaitFailed : public Error {
 public:
  using Error::Error;
};
// Throws WaitFailed{kFault} of a call that waited so long in vain. who: the ranks that it waits for, "rank 1".
[[noreturn]] void fail_waiting(const Communicator& group, std::string_view operation,
                               std::chrono::duration<double> waited, const std::string& who, std::string hint,
                               std::source_location where = std::source_location::current());
// "rank 1", "ranks 1, 2 and 5".
std::string list_ranks(std::span<const int> ranks);

// The argument checks of every communicator, made on kMeta too, before anything moves. They see one rank's arguments
// only: sizes that do not fit the tensors, dtypes or devices that differ, tensors that overlap, ranks that do not
// exist.
void check_all_reduce(const Communicator& group, const Tensor& buffer);
void check_all_gather(const Communicator& group, const Tensor& send, const Tensor& receive,
                      std::span<const int64_t> counts);
void check_reduce_scatter(const Communicator& group, const Tensor& send, const Tensor& receive,
                          std::span<const int64_t> counts);
void check_all_to_all(const Communicator& group, const Tensor& send, std::span<const int64_t> send_counts,
                      const Tensor& receive, std::span<const int64_t> receive_counts);
void check_exchange(const Communicator& group, std::span<const Message> sends, std::span<const Message> receives);
void check_broadcast(const Communicator& group, const Tensor& buffer, int root);
// operation is "send" or "receive".
void check_point_to_point(const Communicator& group, std::string_view operation, const Tensor& buffer, int peer);

// For communicators over host memory: false on meta, where nothing moves; throws for device memory.
bool moves_host_bytes(const Communicator& group, std::string_view operation, const Tensor& tensor);

// Elements before rank `rank` in a tensor that holds counts[r] for each rank r.
int64_t offset_of(std::span<const int64_t> counts, int rank);

}  // namespace invar
