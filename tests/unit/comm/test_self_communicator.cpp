#include "comm/self_communicator.h"

#include "support/catch.h"
#include "support/communicator_suite.h"

namespace invar {

TEST_CASE("the suite over a self communicator") {
  const auto world = make_self_communicator();
  CHECK(world->name() == "world");
  for (const SuiteCase& test : communicator_suite()) {
    Findings findings;
    test.run(*world, findings);
    INFO(test.name);
    CHECK(findings.list() == std::vector<std::string>{});
  }
}

TEST_CASE("equal counts") {
  CHECK(equal_counts(3, 5) == std::vector<int64_t>{5, 5, 5});
  CHECK(equal_counts(2, 0) == std::vector<int64_t>{0, 0});
  CHECK_THROWS_AS(equal_counts(0, 5), Error);
  CHECK_THROWS_AS(equal_counts(2, -1), Error);
}

TEST_CASE("a communicator's error names operation, group, rank and sizes") {
  const auto world = make_self_communicator("tensor");
  const Tensor part(nullptr, DType::kF32, DeviceType::kMeta, {3});
  const Tensor whole(nullptr, DType::kF32, DeviceType::kMeta, {12});
  CHECK_THROWS_WITH(world->all_gather(Stream(DeviceType::kMeta), part, whole, equal_counts(1, 3)),
                    "all_gather in group 'tensor' (rank 0 of 1): counts add up to 3, receive is f32 (12)");
}

}  // namespace invar
