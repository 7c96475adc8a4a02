// Cases that fail on one rank: mpi_end_test runs them one by one to try mpi_main.cpp.
#include "support/catch.h"
#include "support/mpi_world.h"

namespace invar {

TEST_CASE("all is well") {
  CHECK(mpi_session().world().size() == 3);
}

TEST_CASE("one rank fails a check") {
  CHECK(mpi_session().world().rank() != 1);
  mpi_session().world().barrier();
}

TEST_CASE("one rank leaves by a requirement") {
  REQUIRE(mpi_session().world().rank() != 1);
  mpi_session().world().barrier();
  mpi_session().world().barrier();
}

TEST_CASE("one rank leaves by an exception") {
  CHECK(mpi_session().world().size() == 3);
  if (mpi_session().world().rank() == 1) throw Error(ErrorKind::kFault, "out of luck");
  mpi_session().world().barrier();
  mpi_session().world().barrier();
}

}  // namespace invar
