// Entry point of the sequential test executables.
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  return Catch::Session().run(argc, argv);
}

// For the leak sanitizer, which asks for it: HDF5 itself loses memory when it reads damaged files.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libhdf5";
}
