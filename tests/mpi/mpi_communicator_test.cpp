#include "comm/mpi_communicator.h"

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
  const auto world = mpi_session().make_world(10'007);
  check_suite(*world);
}

TEST_CASE("the suite over an MPI group in reversed order") {
  Communicator& world = mpi_session().world();
  check_suite(*world.split(0, -world.rank(), "reversed"));
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
