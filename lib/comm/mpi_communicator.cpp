#include "comm/mpi_communicator.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <optional>
#include <thread>

#include "comm/checks.h"
#include "comm/launcher.h"
#include "comm/mpi_types.h"
#include "comm/mpi_waiting.h"
#include "comm/reduction.h"
#include "comm/self_communicator.h"

namespace invar {
namespace {

constexpr int kMessageTag = 0;
constexpr int kExchangeTag = 1;

// What the groups of a process share.
struct MpiShared {
  explicit MpiShared(std::shared_ptr<MpiWaiting> all) : waiting(std::move(all)) {}
  MpiTypes types;
  std::shared_ptr<MpiWaiting> waiting;
};

// Host memory over MPI, which only moves bytes: the order of the terms in its own reductions depends on counts, sizes
// and library. Here each element of a sum is added on one rank, from the terms of all, in ascending rank order.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, int rank, const std::vector<int>& job_ranks, std::string name,
                  std::shared_ptr<const MpiShared> shared, int64_t largest_piece)
      : Communicator(rank, static_cast<int>(job_ranks.size()), std::move(name), job_ranks),
        comm_(comm),
        shared_(std::move(shared)),
        piece_(largest_piece) {}
  ~MpiCommunicator() override {
    if (may_free()) MPI_Comm_free(&comm_);
  }

  // Takes comm; a group of one needs no MPI.
  static std::unique_ptr<Communicator> adopt(MPI_Comm comm, std::string name, std::shared_ptr<const MpiShared> shared,
                                             int64_t largest_piece) {
    int rank = 0;
    check_start(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_start(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
    const std::vector<int> job_ranks = job_ranks_of(comm);
    if (job_ranks.size() == 1) {
      MPI_Comm_free(&comm);
      return make_self_communicator(std::move(name), job_ranks.front());
    }
    return std::make_unique<MpiCommunicator>(comm, rank, job_ranks, std::move(name), std::move(shared), largest_piece);
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    barrier();  // which, unlike MPI's own call, ends if a rank does not come
    MPI_Comm part = MPI_COMM_NULL;
    check("split", 0, MPI_Comm_split(comm_, color < 0 ? MPI_UNDEFINED : color, key, &part));
    return part == MPI_COMM_NULL ? nullptr : adopt(part, std::move(name), shared_, piece_);
  }

  // Small ones in one exchange: every rank adds everything.
  void all_reduce(const Stream&, const Tensor& buffer, ReduceOp op) override {
    check_all_reduce(*this, buffer);
    if (!moves_host_bytes(*this, "all_reduce", buffer) || buffer.empty()) return;
    if (buffer.bytes() * size() <= kSmallBytes && buffer.numel() * size() <= piece_)
      return all_reduce_small(buffer, op);
    const std::vector<int64_t> counts = part_counts(buffer.numel());
    reduce_own_part("all_reduce", buffer, counts, op, at(buffer, offset_of(counts, rank())));
    gather_in_place("all_reduce", buffer, counts);
  }

  void all_gather(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts) override {
    check_all_gather(*this, send, receive, counts);
    if (!moves_host_bytes(*this, "all_gather", send) || receive.empty()) return;
    std::byte* place = at(receive, offset_of(counts, rank()));
    if (!send.empty() && send.raw() != place) std::memcpy(place, send.raw(), static_cast<size_t>(send.bytes()));
    gather_in_place("all_gather", receive, counts);
  }

  void reduce_scatter(const Stream&, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) override {
    check_reduce_scatter(*this, send, receive, counts);
    if (!moves_host_bytes(*this, "reduce_scatter", send)) return;
    reduce_own_part("reduce_scatter", send, counts, op, static_cast<std::byte*>(receive.raw()));
  }

  void all_to_all(const Stream&, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    check_all_to_all(*this, send, send_counts, receive, receive_counts);
    if (!moves_host_bytes(*this, "all_to_all", send)) return;
    Exchange exchange(*this, "all_to_all", send.dtype());
    for_peers([&](int peer) {
      exchange.receive(at(receive, offset_of(receive_counts, peer)), receive_counts[static_cast<size_t>(peer)], peer);
    });
    for_peers([&](int peer) {
      exchange.send(at(send, offset_of(send_counts, peer)), send_counts[static_cast<size_t>(peer)], peer);
    });
    if (const int64_t own = send_counts[static_cast<size_t>(rank())]; own > 0) {
      std::memcpy(at(receive, offset_of(receive_counts, rank())), at(send, offset_of(send_counts, rank())),
                  static_cast<size_t>(own * size_of(send.dtype())));
    }
    exchange.finish();
  }

  void exchange(const Stream&, std::span<const Message> sends, std::span<const Message> receives) override {
    check_exchange(*this, sends, receives);
    if (sends.empty() && receives.empty()) return;
    const DType dtype = (sends.empty() ? receives : sends).front().buffer.dtype();
    Exchange exchange(*this, "exchange", dtype);
    for (const Message& message : receives) {
      if (!moves_host_bytes(*this, "exchange", message.buffer)) continue;
      exchange.receive(at(message.buffer, 0), message.buffer.numel(), message.peer);
    }
    for (const Message& message : sends) {
      if (!moves_host_bytes(*this, "exchange", message.buffer)) continue;
      exchange.send(at(message.buffer, 0), message.buffer.numel(), message.peer);
    }
    exchange.finish();
  }

  void broadcast(const Stream&, const Tensor& buffer, int root) override {
    check_broadcast(*this, buffer, root);
    if (!moves_host_bytes(*this, "broadcast", buffer)) return;
    broadcast_bytes("broadcast", static_cast<std::byte*>(buffer.raw()), buffer.numel(), buffer.dtype(), root);
  }

  // An empty tensor sends an empty message, so that a peer which expects more finds out.
  void send(const Stream&, const Tensor& buffer, int to) override {
    check_point_to_point(*this, "send", buffer, to);
    if (!moves_host_bytes(*this, "send", buffer)) return;
    const MPI_Datatype type = shared_->types.type_of(buffer.dtype());
    for_message_pieces(buffer.numel(), [&](int64_t begin, int64_t count) {
      call("send", count, [&](MPI_Request* request) {
        return MPI_Isend(at(buffer, begin), as_count(count), type, to, kMessageTag, comm_, request);
      });
    });
  }

  void receive(const Stream&, const Tensor& buffer, int from) override {
    check_point_to_point(*this, "receive", buffer, from);
    if (!moves_host_bytes(*this, "receive", buffer)) return;
    const MPI_Datatype type = shared_->types.type_of(buffer.dtype());
    for_message_pieces(buffer.numel(), [&](int64_t begin, int64_t count) {
      const MPI_Status status = call("receive", count, [&](MPI_Request* request) {
        return MPI_Irecv(at(buffer, begin), as_count(count), type, from, kMessageTag, comm_, request);
      });
      check_received("receive", status, type, as_count(count));
    });
  }

  void barrier() override {
    call("barrier", 0, [&](MPI_Request* request) { return MPI_Ibarrier(comm_, request); });
  }

 private:
  // The counts and offsets that MPI takes.
  struct Parts {
    std::vector<int> counts;
    std::vector<int> offsets;
  };

  // Every count and offset for MPI passes here: none is larger than a piece.
  int as_count(int64_t count) const {
    INVAR_CHECK(0 <= count && count <= piece_, "{} elements in one MPI call, limit {}", count, piece_);
    return static_cast<int>(count);
  }

  Parts parts_of(std::span<const int64_t> counts) const {
    Parts parts;
    int64_t offset = 0;
    for (const int64_t count : counts) {
      parts.counts.push_back(as_count(count));
      parts.offsets.push_back(as_count(offset));
      offset += count;
    }
    return parts;
  }

  std::vector<int64_t> part_counts(int64_t total) const {
    std::vector<int64_t> counts;
    for (int r = 0; r < size(); ++r) counts.push_back(part_of(total, size(), r).size());
    return counts;
  }

  template <class F>
  void for_pieces(int64_t total, F f) const {
    for (int64_t begin = 0; begin < total; begin += piece_) f(begin, std::min(piece_, total - begin));
  }

  template <class F>
  void for_message_pieces(int64_t total, F f) const {
    if (total == 0) return f(int64_t{0}, int64_t{0});
    for_pieces(total, f);
  }

  // Starts behind this rank, so that the ranks do not all begin with rank 0.
  template <class F>
  void for_peers(F f) const {
    for (int step = 1; step < size(); ++step) f((rank() + step) % size());
  }

  static std::byte* at(const Tensor& tensor, int64_t element) {
    return static_cast<std::byte*>(tensor.raw()) + element * size_of(tensor.dtype());
  }

  void check(std::string_view operation, int64_t elements, int code) const {
    if (code != MPI_SUCCESS) {
      fail_collective(*this, operation, format("{} elements: {}", elements, mpi_error_text(code)));
    }
  }

  // Starts a call by start(&request) and waits until it is done.
  template <class Start>
  MPI_Status call(std::string_view operation, int64_t elements, Start start) const {
    MPI_Request request = MPI_REQUEST_NULL;
    check(operation, elements, start(&request));
    return finish(operation, elements, request);
  }
  MPI_Status finish(std::string_view operation, int64_t elements, MPI_Request& request) const {
    MPI_Status status{};
    check(operation, elements, shared_->waiting->wait(*this, operation, request, &status));
    return status;
  }

  void check_received(std::string_view operation, const MPI_Status& status, MPI_Datatype type, int expected) const {
    int received = 0;
    MPI_Get_count(&status, type, &received);
    if (received != expected) {
      fail_collective(*this, operation,
                      format("expected {} elements of rank {}, got {}", expected, status.MPI_SOURCE, received));
    }
  }

  void broadcast_bytes(std::string_view operation, std::byte* data, int64_t elements, DType dtype, int root) const {
    for_pieces(elements, [&](int64_t begin, int64_t count) {
      std::byte* piece = data + begin * size_of(dtype);
      call(operation, count, [&](MPI_Request* request) {
        return MPI_Ibcast(piece, as_count(count), shared_->types.type_of(dtype), root, comm_, request);
      });
    });
  }

  // Every rank's part of `buffer` to all, from and to its place.
  void gather_in_place(std::string_view operation, const Tensor& buffer, std::span<const int64_t> counts) const {
    if (buffer.numel() <= piece_) {
      const Parts parts = parts_of(counts);
      call(operation, buffer.numel(), [&](MPI_Request* request) {
        return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, buffer.raw(), parts.counts.data(),
                               parts.offsets.data(), shared_->types.type_of(buffer.dtype()), comm_, request);
      });
      return;
    }
    for (int root = 0; root < size(); ++root) {  // offsets are ints too: one part after another
      std::byte* part = at(buffer, offset_of(counts, root));
      broadcast_bytes(operation, part, counts[static_cast<size_t>(root)], buffer.dtype(), root);
    }
  }

  void all_reduce_small(const Tensor& buffer, ReduceOp op) const {
    std::array<std::byte, kSmallBytes> all;
    const MPI_Datatype type = shared_->types.type_of(buffer.dtype());
    const int count = as_count(buffer.numel());
    call("all_reduce", count, [&](MPI_Request* request) {
      return MPI_Iallgather(buffer.raw(), count, type, all.data(), count, type, comm_, request);
    });
    std::vector<const std::byte*> terms;
    for (int r = 0; r < size(); ++r) terms.push_back(all.data() + r * buffer.bytes());
    combine_terms(buffer.dtype(), op, terms, count, static_cast<std::byte*>(buffer.raw()));
  }

  // out, `counts[rank]` elements, gets this rank's part of the sum over all ranks' `data`; it may be that part of data.
  // In rounds, for which every rank sends each peer the next elements of that peer's part.
  void reduce_own_part(std::string_view operation, const Tensor& data, std::span<const int64_t> counts, ReduceOp op,
                       std::byte* out) const {
    const int64_t width = size_of(data.dtype());
    const int64_t own = counts[static_cast<size_t>(rank())];
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    const int64_t step = std::clamp(kStagingBytes / (width * (size() - 1)), int64_t{1}, piece_);
    const auto staging =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(std::min(step, own) * width * (size() - 1)));
    std::vector<const std::byte*> terms(static_cast<size_t>(size()));
    for (int64_t begin = 0; begin < longest; begin += step) {
      const auto in_round = [&](int64_t part) { return std::clamp(part - begin, int64_t{0}, step); };
      const int64_t count = in_round(own);
      Exchange exchange(*this, operation, data.dtype());
      std::byte* free = staging.get();
      for_peers([&](int peer) {
        exchange.receive(free, count, peer);
        terms[static_cast<size_t>(peer)] = free;
        free += count * width;
      });
      for_peers([&](int peer) {
        exchange.send(at(data, offset_of(counts, peer) + begin), in_round(counts[static_cast<size_t>(peer)]), peer);
      });
      exchange.finish();
      if (count == 0) continue;
      terms[static_cast<size_t>(rank())] = at(data, offset_of(counts, rank()) + begin);
      combine_terms(data.dtype(), op, terms, count, out + begin * width);
    }
  }

  // Messages among the peers that are all under way at the same time; nothing for an empty one.
  class Exchange {
   public:
    Exchange(const MpiCommunicator& group, std::string_view operation, DType dtype)
        : group_(group), operation_(operation), width_(size_of(dtype)), type_(group.shared_->types.type_of(dtype)) {}

    // All receives come before the first send.
    void receive(std::byte* to, int64_t elements, int peer) {
      group_.for_pieces(elements, [&](int64_t begin, int64_t count) {
        const int expected = expected_.emplace_back(group_.as_count(count));
        group_.check(operation_, count,
                     MPI_Irecv(to + begin * width_, expected, type_, peer, kExchangeTag, group_.comm_,
                               &requests_.emplace_back()));
      });
    }
    void send(const std::byte* from, int64_t elements, int peer) {
      group_.for_pieces(elements, [&](int64_t begin, int64_t count) {
        group_.check(operation_, count,
                     MPI_Isend(from + begin * width_, group_.as_count(count), type_, peer, kExchangeTag, group_.comm_,
                               &requests_.emplace_back()));
      });
    }
    // One after another: MPI_Waitall of Open MPI 4.1 spins for ever on a request that is in error already.
    void finish() {
      for (size_t i = 0; i < requests_.size(); ++i) {
        const bool receives = i < expected_.size();
        const MPI_Status status = group_.finish(operation_, receives ? expected_[i] : 0, requests_[i]);
        if (receives) group_.check_received(operation_, status, type_, expected_[i]);
      }
    }

   private:
    const MpiCommunicator& group_;
    std::string_view operation_;
    int64_t width_;
    MPI_Datatype type_;
    std::vector<MPI_Request> requests_;
    std::vector<int> expected_;  // elements of each receive
  };

  static constexpr int64_t kSmallBytes = 32 << 10;    // terms of all ranks, on the stack
  static constexpr int64_t kStagingBytes = 16 << 20;  // terms of one round of a reduction

  MPI_Comm comm_;
  std::shared_ptr<const MpiShared> shared_;
  int64_t piece_;
};

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) {
  const std::optional<Launcher> launcher = find_launcher([](const char* name) { return std::getenv(name); });
  if (launcher && !launcher->knows_mpi) check_launcher(*launcher, 1);
  if (!launcher) {
    world_ = make_self_communicator();
    return;
  }
  int provided = MPI_THREAD_SINGLE;
  check_start(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int size = 1;
  check_start(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  try {
    check_launcher(*launcher, size);
  } catch (...) {
    MPI_Finalize();  // alone: nobody to wait for
    throw;
  }
  if (provided < MPI_THREAD_FUNNELED) {
    throw Error(ErrorKind::kConfig, "this MPI does not support MPI_THREAD_FUNNELED",
                "use an MPI library that was built with thread support");
  }
  MPI_Comm host = MPI_COMM_NULL;
  check_start(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
              "MPI_Comm_split_type");
  check_start(MPI_Comm_rank(host, &local_rank_), "MPI_Comm_rank");
  check_start(MPI_Comm_size(host, &local_size_), "MPI_Comm_size");
  check_start(MPI_Allreduce(MPI_IN_PLACE, local_cores_.data(), static_cast<int>(local_cores_.size()), MPI_UINT64_T,
                            MPI_BOR, host),
              "MPI_Allreduce");
  MPI_Comm_free(&host);
  initialised_ = true;
  waiting_ = std::make_shared<MpiWaiting>();
  world_ = make_world();
}

std::unique_ptr<Communicator> MpiSession::make_world(int64_t largest_piece) const {
  INVAR_CHECK(1 <= largest_piece && largest_piece <= kLargestPiece, "pieces of {}", largest_piece);
  if (!initialised_) return make_self_communicator();
  MPI_Comm all = MPI_COMM_NULL;
  check_start(MPI_Comm_dup(MPI_COMM_WORLD, &all), "MPI_Comm_dup");
  return MpiCommunicator::adopt(all, "world", std::make_shared<const MpiShared>(waiting_), largest_piece);
}

MpiSession::~MpiSession() {
  if (!initialised_ || std::uncaught_exceptions() > 0) return;
  world_.reset();
  MPI_Finalize();
}

// Two barriers: an idle rank has begun the first one early, and others may get through it without its further help.
void MpiSession::meet_at_the_end(bool idle) {
  if (!initialised_) return;
  for (const bool sleeps : {idle, false}) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_start(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
    for (int done = 0; sleeps && done == 0;) {
      check_start(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) break;
      waiting_->answer([] { return std::string("the end of the job"); });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    check_start(waiting_->wait(*world_, "barrier at the end", request), "MPI_Ibarrier");
  }
}

void MpiSession::set_timeout(std::chrono::milliseconds timeout) {
  if (initialised_) waiting_->set_timeout(timeout);
}

void MpiSession::announce_end() const {
  if (!initialised_) return;
  for (int rank = world_->rank() + 1; rank < world_->size(); ++rank) {
    MPI_Request never_awaited = MPI_REQUEST_NULL;
    MPI_Isend(nullptr, 0, MPI_BYTE, rank, kEndTag, MPI_COMM_WORLD, &never_awaited);
  }
}

bool MpiSession::end_is_announced() const {
  int announced = 0;
  if (initialised_) MPI_Iprobe(MPI_ANY_SOURCE, kEndTag, MPI_COMM_WORLD, &announced, MPI_STATUS_IGNORE);
  return announced != 0;
}

void MpiSession::abort(int exit_code) {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  if (initialised_) MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

}  // namespace invar
