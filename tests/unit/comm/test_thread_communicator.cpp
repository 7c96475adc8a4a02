#include "comm/thread_communicator.h"

#include "support/catch.h"
#include "support/guarded_buffer.h"
#include "unit/comm/thread_suite.h"

namespace invar {
namespace {
const Stream kStream(DeviceType::kCpu);
}

TEST_CASE("the suite over thread ranks") {
  for (const int size : {1, 2, 3, 4, 8}) {
    for (const SuiteCase& test : communicator_suite()) {
      INFO(test.name << " on " << size << " ranks");
      CHECK(thread_findings(size, test) == std::vector<std::string>{});
    }
  }
}

TEST_CASE("the suite over a group of thread ranks in reversed order") {
  for (const SuiteCase& test : communicator_suite()) {
    std::unique_ptr<Communicator> groups[4];
    const auto reversed = [&](Communicator& world) -> Communicator& {
      auto& group = groups[world.rank()];
      group = world.split(0, -world.rank(), "reversed");
      return *group;
    };
    INFO(test.name);
    CHECK(thread_findings(4, test, reversed) == std::vector<std::string>{});
  }
}

// 2^24 + 1 - 2^24 in fp32: only the order of the ranks gives this value.
TEST_CASE("thread ranks reduce in ascending rank order") {
  const float terms[] = {0x1p24f, 1.0f, -0x1p24f, 3.0f};
  const float ascending = ((terms[0] + terms[1]) + terms[2]) + terms[3];
  CHECK(ascending == 3.0f);
  CHECK(terms[0] + terms[2] + terms[1] + terms[3] == 4.0f);
  std::vector<float> sums(4), parts(4);
  run_thread_ranks(4, [&](Communicator& world) {
    const auto rank = static_cast<size_t>(world.rank());
    GuardedBuffer<float> buffer(5, [&](int64_t) { return terms[rank]; });
    world.all_reduce(kStream, buffer.tensor(), ReduceOp::kSum);
    sums[rank] = buffer.data()[4];
    GuardedBuffer<float> send(4, [&](int64_t) { return terms[rank]; });
    const auto own = send.part(world.rank(), 1);
    world.reduce_scatter(kStream, send.tensor(), own, equal_counts(4, 1), ReduceOp::kSum);
    parts[rank] = send.data()[rank];
  });
  CHECK(sums == std::vector<float>(4, ascending));
  CHECK(parts == std::vector<float>(4, ascending));
}

}  // namespace invar
