// The communicator suite over NCCL, ranks sharing GPUs where these are fewer; run by tests/e2e/test_gpus.py.
#include <algorithm>
#include <chrono>
#include <iostream>

#include "comm/nccl_communicator.h"
#include "support/catch.h"
#include "support/communicator_suite.h"
#include "support/mpi_world.h"
#include "support/through_device.h"

namespace invar {
namespace {

std::unique_ptr<Communicator> make_world() {
  MpiSession& session = mpi_session();
  NcclOptions options;
  options.timeout = std::chrono::minutes(1);
  options.on_failure = [&session](const std::string& report) {
    std::cerr << report << '\n';
    session.abort(1);
  };
  options.share_gpus = session.local_size() > std::max(1, cuda_device_count());
  const std::shared_ptr<Communicator> host(&session.world(), [](Communicator*) {});
  return std::make_unique<ThroughDevice>(make_nccl_communicator(host, options),
                                         make_cuda_stream(session.local_rank() % std::max(1, cuda_device_count())));
}

void check_suite(Communicator& world, const std::vector<SuiteCase>& cases) {
  for (const SuiteCase& test : cases) {
    Findings findings;
    test.run(world, findings);
    INFO(test.name << " on rank " << world.rank() << " of " << world.size());
    CHECK(findings.list() == std::vector<std::string>{});
  }
}

}  // namespace

TEST_CASE("the suite over NCCL, and over a group of it in reversed order") {
  const std::unique_ptr<Communicator> world = make_world();
  check_suite(*world, collective_cases());
  check_suite(*world->split(0, -world->rank(), "reversed"), collective_cases());
}

}  // namespace invar
