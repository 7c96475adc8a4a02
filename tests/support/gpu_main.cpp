// Entry point of the tests that need a GPU.
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif
#include <iostream>

#include "device/device.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;  // CTest's SKIP_RETURN_CODE
  if (invar::cuda_device_count() == 0) {
    std::cout << "skipped: no GPU\n";
    return kSkipped;
  }
  return Catch::Session().run(argc, argv);
}
