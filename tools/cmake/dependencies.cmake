# Every third-party package, from the system. tools/setup installs them on Debian and Ubuntu.
find_package(Threads REQUIRED)
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(yaml-cpp REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json 3.9 REQUIRED)
find_package(HDF5 REQUIRED COMPONENTS C)
find_package(ZLIB REQUIRED)
find_package(CLI11 REQUIRED)
if(INVAR_BUILD_TESTS)
  find_package(Catch2 REQUIRED) # 2.13 or 3.x: tests/support/catch.h hides the difference
endif()

# yaml-cpp renamed its target in 0.8.
if(NOT TARGET yaml-cpp::yaml-cpp)
  add_library(invar_yaml_cpp INTERFACE)
  target_link_libraries(invar_yaml_cpp INTERFACE yaml-cpp)
  add_library(yaml-cpp::yaml-cpp ALIAS invar_yaml_cpp)
endif()
