#include "parallel/host_share.h"

#include "comm/fake_communicator.h"
#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("what ranks need is added up on each host") {
  run_thread_ranks(5, [](Communicator& world) {
    const bool second = world.rank() % 2 == 1;
    const HostShare share = share_of_host(world, 10 + world.rank(), second ? "b" : "a");
    CHECK(share.ranks == (second ? 2 : 3));
    CHECK(share.sum == (second ? 24 : 36));
    const HostShare here = share_of_host(world, 7);
    CHECK(here.sum == 35);
  });
}

TEST_CASE("a rank whose peers do not exist has its host alone") {
  const auto world = make_fake_communicator(0, 8, "world");
  const HostShare share = share_of_host(*world, 7);
  CHECK(share.ranks == 1);
  CHECK(share.sum == 7);
}
