// The cases of the communicator suite that move data, in GPU memory, by ranks that share a GPU.
#include "comm/device_communicator.h"
#include "device_tensor.h"
#include "support/through_device.h"
#include "unit/comm/thread_suite.h"

namespace invar {
namespace {

std::shared_ptr<Communicator> borrowed(Communicator& world) {
  return {&world, [](Communicator*) {}};
}

TEST_CASE("the suite through host memory") {
  for (const int size : {1, 3}) {
    for (const SuiteCase& test : collective_cases()) {
      const auto findings = thread_findings(size, test, [](Communicator& world) -> Communicator& {
        thread_local std::unique_ptr<ThroughDevice> device;
        device = std::make_unique<ThroughDevice>(make_staged_communicator(borrowed(world)), make_cuda_stream(0));
        return *device;
      });
      INFO(test.name << " with " << size << " ranks");
      CHECK(findings == std::vector<std::string>{});
    }
  }
}

}  // namespace
}  // namespace invar
