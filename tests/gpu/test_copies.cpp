#include "parity/copies_case.h"

TEST_CASE("on a GPU one bit of one rank's copy is named by the next comparison, with tensor and ranks") {
  invar::test::check_flips(invar::DeviceType::kCuda);
}
