#include "comm/checks.h"

#include <functional>
#include <numeric>

namespace invar {
namespace {

// One operation's arguments on one rank.
class Checker {
 public:
  Checker(const Communicator& group, std::string_view operation) : group_(group), operation_(operation) {}

  void has_memory(const Tensor& tensor) const {
    if (!tensor.is_meta() && !tensor.empty() && tensor.raw() == nullptr) {
      fail_collective(group_, operation_, format("{} has no memory", tensor.describe()));
    }
  }

  void alike(const Tensor& send, const Tensor& receive) const {
    has_memory(send);
    has_memory(receive);
    if (send.dtype() != receive.dtype()) {
      fail_collective(group_, operation_, format("send is {}, receive is {}", send.describe(), receive.describe()));
    }
    if (send.device() != receive.device()) {
      fail_collective(group_, operation_,
                      format("send is on {}, receive on {}", name_of(send.device()), name_of(receive.device())));
    }
  }

  // The counts are one per rank and add up to the tensor.
  void adds_up(std::string_view what, std::span<const int64_t> counts, const Tensor& tensor) const {
    if (std::ssize(counts) != group_.size()) {
      fail_collective(group_, operation_, format("{} counts for {} ranks", counts.size(), group_.size()));
    }
    for (const int64_t count : counts) {
      if (count < 0) fail_collective(group_, operation_, format("negative count {}", count));
    }
    const int64_t total = std::reduce(counts.begin(), counts.end());
    if (total != tensor.numel()) {
      fail_collective(group_, operation_, format("counts add up to {}, {} is {}", total, what, tensor.describe()));
    }
  }

  // `part` holds this rank's count, and lies in `whole` at its own place or nowhere.
  void is_own_part(std::string_view what, const Tensor& part, const Tensor& whole,
                   std::span<const int64_t> counts) const {
    const int64_t count = counts[static_cast<size_t>(group_.rank())];
    if (part.numel() != count) {
      fail_collective(group_, operation_, format("count of this rank is {}, {} is {}", count, what, part.describe()));
    }
    const auto* place = static_cast<const std::byte*>(whole.raw()) +
                        (whole.is_meta() ? 0 : offset_of(counts, group_.rank()) * size_of(whole.dtype()));
    if (part.raw() != place && overlap(part, whole)) {
      fail_collective(group_, operation_, format("{} overlaps the other tensor and is not at its own place", what));
    }
  }

  void disjoint(const Tensor& send, const Tensor& receive) const {
    if (overlap(send, receive)) fail_collective(group_, operation_, "send and receive overlap");
  }

  void is_rank(std::string_view what, int rank) const {
    if (rank < 0 || rank >= group_.size()) fail_collective(group_, operation_, format("{} is rank {}", what, rank));
  }

  void is_peer(int rank) const {
    is_rank("the peer", rank);
    if (rank == group_.rank()) fail_collective(group_, operation_, "the peer is this rank itself");
  }

 private:
  static bool overlap(const Tensor& a, const Tensor& b) {
    if (a.is_meta() || a.empty() || b.empty()) return false;
    const auto* begin_a = static_cast<const std::byte*>(a.raw());
    const auto* begin_b = static_cast<const std::byte*>(b.raw());
    const std::less<> before;  // total order also for pointers into different blocks
    return before(begin_a, begin_b + b.bytes()) && before(begin_b, begin_a + a.bytes());
  }

  const Communicator& group_;
  std::string_view operation_;
};

}  // namespace

void fail_collective(const Communicator& group, std::string_view operation, const std::string& what,
                     std::source_location where) {
  throw Error(ErrorKind::kFault,
              format("{} in group '{}' (rank {} of {}): {}", operation, group.name(), group.rank(), group.size(), what),
              "", where);
}

void fail_waiting(const Communicator& group, std::string_view operation, std::chrono::duration<double> waited,
                  const std::string& who, std::string hint, std::source_location where) {
  throw WaitFailed(ErrorKind::kFault,
                   format("{} in group '{}' (rank {} of {}): not done {:.1f} s after it began: {}", operation,
                          group.name(), group.rank(), group.size(), waited.count(), who),
                   std::move(hint), where);
}

std::string list_ranks(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += i == 0 ? " " : i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

void check_all_reduce(const Communicator& group, const Tensor& buffer) {
  Checker(group, "all_reduce").has_memory(buffer);
}

void check_all_gather(const Communicator& group, const Tensor& send, const Tensor& receive,
                      std::span<const int64_t> counts) {
  const Checker check(group, "all_gather");
  check.alike(send, receive);
  check.adds_up("receive", counts, receive);
  check.is_own_part("send", send, receive, counts);
}

void check_reduce_scatter(const Communicator& group, const Tensor& send, const Tensor& receive,
                          std::span<const int64_t> counts) {
  const Checker check(group, "reduce_scatter");
  check.alike(send, receive);
  check.adds_up("send", counts, send);
  check.is_own_part("receive", receive, send, counts);
}

void check_all_to_all(const Communicator& group, const Tensor& send, std::span<const int64_t> send_counts,
                      const Tensor& receive, std::span<const int64_t> receive_counts) {
  const Checker check(group, "all_to_all");
  check.alike(send, receive);
  check.adds_up("send", send_counts, send);
  check.adds_up("receive", receive_counts, receive);
  const auto own = static_cast<size_t>(group.rank());
  if (send_counts[own] != receive_counts[own]) {
    fail_collective(group, "all_to_all",
                    format("this rank sends itself {} and receives {}", send_counts[own], receive_counts[own]));
  }
  check.disjoint(send, receive);
}

void check_exchange(const Communicator& group, std::span<const Message> sends, std::span<const Message> receives) {
  const Checker check(group, "exchange");
  const Tensor* first = nullptr;
  for (const std::span<const Message> messages : {sends, receives}) {
    for (const Message& message : messages) {
      check.is_peer(message.peer);
      if (first == nullptr) first = &message.buffer;
      check.alike(*first, message.buffer);
    }
  }
}

void check_broadcast(const Communicator& group, const Tensor& buffer, int root) {
  const Checker check(group, "broadcast");
  check.has_memory(buffer);
  check.is_rank("the root", root);
}

void check_point_to_point(const Communicator& group, std::string_view operation, const Tensor& buffer, int peer) {
  const Checker check(group, operation);
  check.has_memory(buffer);
  check.is_peer(peer);
}

bool moves_host_bytes(const Communicator& group, std::string_view operation, const Tensor& tensor) {
  if (tensor.device() == DeviceType::kCuda) {
    fail_collective(group, operation, format("{} is on cuda; this communicator moves host memory", tensor.describe()));
  }
  return !tensor.is_meta();
}

int64_t offset_of(std::span<const int64_t> counts, int rank) {
  const auto before = counts.first(static_cast<size_t>(rank));
  return std::reduce(before.begin(), before.end());
}

}  // namespace invar
