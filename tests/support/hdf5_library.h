#pragma once

// What the HDF5 library, and with it h5py, finds in a file.

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/hdf5_library.h"
#include "support/catch.h"

namespace invar::test {

// All values of a dataset, as f32.
inline std::vector<float> read_by_library(const std::filesystem::path& path, const std::string& name) {
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  REQUIRE(file >= 0);
  const hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  REQUIRE(dataset >= 0);
  const hid_t space = H5Dget_space(dataset);
  std::vector<float> values(static_cast<size_t>(H5Sget_simple_extent_npoints(space)));
  CHECK(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0);
  H5Sclose(space);
  H5Dclose(dataset);
  H5Fclose(file);
  return values;
}

}  // namespace invar::test
