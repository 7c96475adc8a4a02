#include "comm/mpi_communicator.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "comm/thread_communicator.h"
#include "core/philox.h"
#include "support/catch.h"
#include "support/communicator_suite.h"
#include "support/guarded_buffer.h"
#include "support/mpi_world.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kCpu);

void check_suite(Communicator& world) {
  for (const SuiteCase& test : communicator_suite()) {
    Findings findings;
    test.run(world, findings);
    INFO(test.name << " on rank " << world.rank() << " of " << world.size());
    CHECK(findings.list() == std::vector<std::string>{});
  }
}

// The message of the error that the call ends with, empty if it does not.
template <class F>
std::string error_of(F call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the suite over MPI") {
  check_suite(mpi_session().world());
}

// Small pieces take the paths of tensors with more than 2^31 elements. That no MPI call gets more than a piece is
// checked inside: an operation that forgets to split fails here.
TEST_CASE("the suite over MPI in pieces") {
  for (const int64_t largest_piece : {10'007, 1009}) {
    INFO("pieces of " << largest_piece);
    check_suite(*mpi_session().make_world(largest_piece));
  }
}

TEST_CASE("the suite over an MPI group in reversed order") {
  Communicator& world = mpi_session().world();
  check_suite(*world.split(0, -world.rank(), "reversed"));
}

// A sum of several rounds: one part is longer than what is staged at once. The others' parts are short, or empty.
TEST_CASE("the terms of a large sum arrive in rounds") {
  Communicator& world = mpi_session().world();
  const int64_t large = int64_t{5} << 20;
  const auto term = [](int rank, int64_t i) {
    const auto mixed = static_cast<uint32_t>((i + 1) * 2654435761 + rank * 40503);
    return std::bit_cast<float>((mixed & 0x007fffffu) | ((115 + mixed % 24) << 23));
  };
  const auto sum = [&](int64_t i) {
    float total = term(0, i);
    for (int rank = 1; rank < world.size(); ++rank) total += term(rank, i);
    return total;
  };
  std::vector<int64_t> counts = equal_counts(world.size(), 1001);
  counts.front() = 0;
  counts.back() = large;
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  GuardedBuffer<float> send(total, [&](int64_t i) { return term(world.rank(), i); });
  GuardedBuffer<float> receive(counts[static_cast<size_t>(world.rank())]);
  world.reduce_scatter(kStream, send.tensor(), receive.tensor(), counts, ReduceOp::kSum);
  const int64_t begin = std::accumulate(counts.begin(), counts.begin() + world.rank(), int64_t{0});
  int64_t wrong = 0;
  for (int64_t i = 0; i < receive.count(); ++i) wrong += receive.data()[i] != sum(begin + i);
  CHECK(wrong == 0);
  CHECK(receive.guards_intact());
}

// What thread ranks compute is computed in this process: threads need no MPI.
TEST_CASE("MPI ranks and thread ranks have the same sums") {
  Communicator& world = mpi_session().world();
  std::vector<int64_t> counts;
  for (int r = 0; r < world.size(); ++r) counts.push_back(r % 2 == 0 ? 30'011 : 7);
  const auto run = [&]<class T>(T) {
    const auto reduce = [&](Communicator& group) {
      const Philox random(3, RandomPurpose::kWeights, static_cast<uint64_t>(group.rank()));
      const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      GuardedBuffer<T> send(total, [&](int64_t i) {
        const auto words = random.block(static_cast<uint64_t>(i));
        return T(std::ldexp(static_cast<float>(words[0]) - 0x1p31f, static_cast<int>(words[1] % 25) - 43));
      });
      std::vector<T> sums(static_cast<size_t>(counts[static_cast<size_t>(group.rank())]));
      const Tensor own(sums.data(), DTypeOf<T>::value, DeviceType::kCpu, {std::ssize(sums)});
      group.reduce_scatter(kStream, send.tensor(), own, counts, ReduceOp::kSum);
      group.all_reduce(kStream, send.tensor(), ReduceOp::kSum);
      sums.insert(sums.end(), send.data(), send.data() + total);
      return sums;
    };
    const std::vector<T> over_mpi = reduce(world);
    std::vector<T> over_threads;
    run_thread_ranks(world.size(), [&](Communicator& group) {
      const std::vector<T> sums = reduce(group);
      if (group.rank() == world.rank()) over_threads = sums;
    });
    REQUIRE(over_mpi.size() == over_threads.size());
    CHECK(std::memcmp(over_mpi.data(), over_threads.data(), over_mpi.size() * sizeof(T)) == 0);
  };
  run(float{});
  run(BF16{});
}

TEST_CASE("the ranks of this host") {
  CHECK(mpi_session().local_rank() == mpi_session().world().rank());
  CHECK(mpi_session().local_size() == mpi_session().world().size());
}

TEST_CASE("pieces have a size that MPI can count") {
  CHECK_THROWS_AS(mpi_session().make_world(0), Error);
  CHECK_THROWS_AS(mpi_session().make_world(MpiSession::kLargestPiece + 1), Error);
}

TEST_CASE("a message of another size is an error that names operation, group and sizes") {
  Communicator& world = mpi_session().world();
  if (world.size() == 1) return;
  for (const int64_t expected : {3, 5}) {
    GuardedBuffer<float> buffer(5);
    std::string error;
    if (world.rank() == 0) world.send(kStream, buffer.part(0, 4), 1);
    if (world.rank() == 1) error = error_of([&] { world.receive(kStream, buffer.part(0, expected), 0); });
    INFO(error);
    CHECK((error != "") == (world.rank() == 1));
    if (world.rank() != 1) continue;
    CHECK(error.starts_with(format("receive in group 'world' (rank 1 of {}): ", world.size())));
    CHECK(error.find(expected == 3 ? "MPI_ERR_TRUNCATE" : "expected 5 elements of rank 0, got 4") != std::string::npos);
  }
  world.barrier();
}

TEST_CASE("an exchange whose counts do not fit is an error") {
  Communicator& world = mpi_session().world();
  if (world.size() == 1) return;
  for (const int64_t expected : {3, 5}) {
    // Rank 0 sends 4 elements to rank 1, which expects fewer or more; the others exchange nothing.
    std::vector<int64_t> send_counts(static_cast<size_t>(world.size()), 0), receive_counts = send_counts;
    if (world.rank() == 0) send_counts[1] = 4;
    if (world.rank() == 1) receive_counts[0] = expected;
    GuardedBuffer<float> send(world.rank() == 0 ? 4 : 0), receive(world.rank() == 1 ? expected : 0);
    const std::string error =
        error_of([&] { world.all_to_all(kStream, send.tensor(), send_counts, receive.tensor(), receive_counts); });
    INFO(error);
    CHECK((error != "") == (world.rank() == 1));
    if (world.rank() == 1) CHECK(error.starts_with("all_to_all in group 'world'"));
  }
  world.barrier();
}

}  // namespace invar
