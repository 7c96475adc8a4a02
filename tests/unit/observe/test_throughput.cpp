#include <cmath>

#include "observe/activation_dump.h"
#include "observe/throughput.h"
#include "support/catch.h"

using namespace invar;

static_assert(std::has_virtual_destructor_v<TensorSink> && std::is_abstract_v<TensorSink>);

TEST_CASE("Speed is that of the last step") {
  Throughput throughput(3e12, 2);
  CHECK(throughput.tokens_per_s() == 0);
  CHECK(throughput.tflops_per_device() == 0);
  throughput.record(4.0, 1000);
  throughput.record(0.5, 1000);
  CHECK(throughput.tokens_per_s() == 2000);
  CHECK(throughput.tflops_per_device() == 3);  // 3e12 FLOPs in half a second on two devices
}

TEST_CASE("The time left is smoothed and ignores the first step") {
  Throughput throughput(1, 1);
  CHECK(std::isnan(throughput.seconds_left(10)));
  throughput.record(100.0, 1);  // warm-up
  CHECK(std::isnan(throughput.seconds_left(9)));
  throughput.record(2.0, 1);
  CHECK(throughput.seconds_left(8) == 16);
  throughput.record(3.0, 1);  // average 2 + 0.1 · (3 − 2)
  CHECK(throughput.seconds_left(10) == Approx(21).epsilon(1e-12));
  CHECK(throughput.seconds_left(0) == 0);
  for (int i = 0; i < 200; ++i) throughput.record(5.0, 1);
  CHECK(throughput.seconds_left(1) == Approx(5).epsilon(1e-6));
}
