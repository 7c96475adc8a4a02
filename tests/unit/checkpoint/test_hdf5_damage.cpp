// HDF5 files that are damaged, or of forms that invar does not write: refused, whatever they say.
#include <filesystem>
#include <functional>
#include <numeric>

#include "checkpoint/hdf5_file.h"
#include "support/errors.h"
#include "support/hdf5_library.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

enum class Sum { kNone, kBehind };

std::vector<float> counting(size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

std::string write_sound(const TemporaryFolder& folder, Sum sum) {
  Hdf5Writer writer(folder / "sound.h5");
  writer.write<float>("x", std::vector<int64_t>{30, 7}, counting(210));
  writer.write<int64_t>("group/n", std::vector<int64_t>{3}, std::vector<int64_t>{1, 2, 3});
  writer.set_attribute("step", int64_t{7});
  sum == Sum::kBehind ? writer.finish_with_sum() : writer.finish();
  return folder.read("sound.h5");
}

// All that the file shows is read; whether that ended in an error, which must name the file.
bool is_refused(const TemporaryFolder& folder, const std::string& bytes) {
  folder.write("damaged.h5", bytes);
  const auto error = error_of([&] {
    const Hdf5Reader reader(folder / "damaged.h5");
    for (const std::string& name : reader.names()) {
      const Hdf5Info info = reader.info(name);
      CHECK(info.rows() * info.cols() * size_of(info.dtype) <= std::ssize(bytes));
      reader.read_f32(name);
    }
    reader.integer_attribute("step");
  });
  if (error) CHECK((error->kind() == ErrorKind::kData && contains(error->what(), "damaged.h5")));
  return error.has_value();
}

// A file that the library writes with one dataset "x" of four numbers.
struct Made {
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  hid_t type = H5T_IEEE_F32LE;

  void write(const std::filesystem::path& path) {
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
    const hsize_t four = 4;
    const hid_t space = H5Screate_simple(1, &four, nullptr);
    const hid_t dataset = H5Dcreate2(file, "x", type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    REQUIRE(dataset >= 0);
    const float values[] = {1, 2, 3, 4};
    CHECK(H5Dwrite(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
    H5Dclose(dataset);
    H5Sclose(space);
    H5Fclose(file);
    H5Pclose(creation);
    H5Pclose(access);
  }
};

}  // namespace

TEST_CASE("Damage of what a file says of itself ends in an error, or shows other values, and nothing else") {
  const TemporaryFolder folder;
  const std::string sound = write_sound(folder, Sum::kNone);
  int refused = 0;
  for (size_t at = 0; at < sound.size(); ++at) {
    INFO("byte " << at);
    std::string damaged = sound;
    damaged[at] = static_cast<char>(~damaged[at]);
    refused += is_refused(folder, damaged) ? 1 : 0;
    const size_t length = std::min<size_t>(8, sound.size() - at);
    if (at % 4 == 0) refused += is_refused(folder, damaged.replace(at, length, length, '\xff')) ? 1 : 0;
    if (at % 16 == 0) CHECK(is_refused(folder, sound.substr(0, at)));  // cut off
  }
  CHECK(refused > 300);
}

TEST_CASE("A description that is damaged is told where its dataset is asked for, and never taken for one not there") {
  const TemporaryFolder folder;
  std::string bytes = write_sound(folder, Sum::kNone);
  const size_t type = bytes.find(std::string("\x11\x20\x1f\0\x04\0\0\0", 8));
  REQUIRE(type != std::string::npos);
  bytes[type] = 0x12;
  folder.write("damaged.h5", bytes);
  require_error(ErrorKind::kData, {"damaged.h5", "dataset 'x'", "neither f32"},
                [&] { Hdf5Reader(folder / "damaged.h5").info("x"); });
}

TEST_CASE("Datasets and attributes of other forms leave the rest of a file readable") {
  const TemporaryFolder folder;
  write_sound(folder, Sum::kNone);
  const hid_t file = H5Fopen((folder / "sound.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  const hsize_t four = 4;
  const hid_t list = H5Screate_simple(1, &four, nullptr), nothing = H5Screate(H5S_NULL);
  H5Dclose(H5Dcreate2(file, "foreign", H5T_IEEE_F32BE, list, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  H5Aclose(H5Acreate2(file, "none", H5T_STD_I64LE, nothing, H5P_DEFAULT, H5P_DEFAULT));  // h5py.Empty
  H5Lcreate_soft("/x", file, "link", H5P_DEFAULT, H5P_DEFAULT);
  H5Sclose(list);
  H5Sclose(nothing);
  H5Fclose(file);
  const Hdf5Reader reader(folder / "sound.h5");
  CHECK(reader.read_f32("x") == counting(210));
  CHECK(reader.integer_attribute("step") == 7);
  CHECK(reader.names() == std::vector<std::string>{"foreign", "link", "x"});
  require_error(ErrorKind::kData, {"sound.h5", "dataset 'foreign'", "neither f32"}, [&] { reader.info("foreign"); });
  require_error(ErrorKind::kData, {"sound.h5", "dataset 'link'", "is a link"}, [&] { reader.read_f32("link"); });
  require_error(ErrorKind::kData, {"sound.h5", "attribute 'none' is not read", "its dataspace"},
                [&] { reader.integer_attribute("none"); });
}

TEST_CASE("Of a file with its sum a changed byte anywhere is noticed; the library reads it as if there were none") {
  const TemporaryFolder folder;
  const std::string sound = write_sound(folder, Sum::kBehind);
  CHECK(read_by_library(folder / "sound.h5", "x") == counting(210));
  CHECK(Hdf5Reader(folder / "sound.h5").read_f32("x") == counting(210));
  for (size_t at = 0; at < sound.size(); at += 5) {
    INFO("byte " << at);
    std::string damaged = sound;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x20);
    CHECK(is_refused(folder, damaged));
  }
  CHECK(is_refused(folder, sound + "x"));
}

TEST_CASE("Files that refer to themselves end in an error") {
  const TemporaryFolder folder;
  const std::string sound = write_sound(folder, Sum::kNone);
  // The root's header, at 96, has one message: where its tree and its names are. The group's is made the root's.
  uint64_t tree = 0;
  std::memcpy(&tree, sound.data() + 80, 8);
  int found = 0;
  for (size_t at = 96; at + 8 <= sound.size(); ++at) {  // wherever an address is, that of the root's header or tree
    for (const uint64_t target : {uint64_t{96}, tree}) {
      uint64_t address = 0;
      std::memcpy(&address, sound.data() + at, 8);
      if (address < 96 || address >= sound.size()) continue;
      std::string damaged = sound;
      std::memcpy(damaged.data() + at, &target, 8);
      found += is_refused(folder, damaged) ? 1 : 0;
    }
  }
  CHECK(found > 5);
}

TEST_CASE("Storage of other forms is refused with its name") {
  const TemporaryFolder folder;
  const auto refused = [&](Made made, const std::string& what) {
    made.write(folder / "made.h5");
    require_error(ErrorKind::kData, {"made.h5", what}, [&] { Hdf5Reader(folder / "made.h5").read_f32("x"); });
  };
  Made sound;
  sound.write(folder / "sound.h5");  // the library's own defaults, which are h5py's
  CHECK(Hdf5Reader(folder / "sound.h5").read_f32("x") == std::vector<float>{1, 2, 3, 4});
  Made chunked;
  const hsize_t two = 2;
  H5Pset_chunk(chunked.creation, 1, &two);
  refused(chunked, "dataset 'x': its values do not lie in one piece in this file");
  Made compact;
  H5Pset_layout(compact.creation, H5D_COMPACT);
  refused(compact, "do not lie in one piece in this file");
  Made external;
  H5Pset_external(external.creation, (folder / "elsewhere").c_str(), 0, 16);
  refused(external, "do not lie in one piece in this file");
  Made big_endian;
  big_endian.type = H5T_IEEE_F32BE;
  refused(big_endian, "dataset 'x': neither f32");
  Made latest;
  H5Pset_libver_bounds(latest.access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
  refused(latest, "in a format that invar does not read");
}

TEST_CASE("Links to other places are refused") {
  const TemporaryFolder folder;
  Made().write(folder / "target.h5");
  for (const bool external : {false, true}) {
    Made().write(folder / "made.h5");
    const hid_t file = H5Fopen((folder / "made.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    if (external) {
      H5Lcreate_external((folder / "target.h5").c_str(), "x", file, "y", H5P_DEFAULT, H5P_DEFAULT);
    } else {
      H5Lcreate_soft("/x", file, "y", H5P_DEFAULT, H5P_DEFAULT);
    }
    H5Fclose(file);
    CHECK(error_of([&] { Hdf5Reader(folder / "made.h5").read_f32("y"); }).has_value());
  }
}
