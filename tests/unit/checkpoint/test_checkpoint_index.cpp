// What an index may say, in either format.
#include <sys/resource.h>

#include <filesystem>
#include <functional>
#include <numeric>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checksum.h"
#include "checkpoint/index_table.h"
#include "support/errors.h"
#include "support/hdf5_library.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;
namespace fs = std::filesystem;

namespace {

StateTensor tensor(const std::string& name, std::vector<int64_t> shape) {
  StateTensor result;
  result.name = name;
  result.shape = std::move(shape);
  return result;
}

// Two ranks with half of the rows and of the columns of two tensors, and rank 1 with all of a third.
CheckpointIndex sound_index() {
  CheckpointIndex index;
  index.info = {7, 28, 280, 1, true, "train:\n  steps: 9\n", "tensor 2 x data 1", "leaves 8\n", "0123456789abcdef"};
  index.hdf5_bytes = 1000;
  index.tensors = {tensor("model/rows", {6, 4}), tensor("model/columns", {3, 8}), tensor("model/norm", {5})};
  index.files = {{0, 2000, 1}, {1, 3000, 2}};
  index.pieces = {{0, 0, {{0, 2}, {0, 4}}, {1, 4}, 800, {1, 2}},
                  {0, 1, {{2, 6}, {0, 4}}, {4, 4}, 800, {3}},
                  {1, 0, {{0, 3}, {0, 4}}, {3, 2}, 1000, {4, 5}},
                  {1, 1, {{0, 3}, {4, 8}}, {2, 2}, 1000, {6, 7, 8, 9}},
                  {2, 1, {{0, 5}, {0, 1}}, {5, 1}, 2980, {10}}};
  return index;
}

// With the sum of what is there, as an index of another writer would have.
std::vector<std::byte> with_sum(std::vector<std::byte> bytes) {
  const uint32_t sum = crc32(std::span(bytes).first(bytes.size() - 4));
  std::memcpy(bytes.data() + bytes.size() - 4, &sum, 4);
  return bytes;
}

}  // namespace

TEST_CASE("An index is decoded to what was encoded") {
  const CheckpointIndex index = sound_index();
  const CheckpointIndex found = decode_index(encode_index(index), "index.bin");
  CHECK(found.info == index.info);
  CHECK(found.version == 2);
  CHECK(found.tensors.size() == 3);
  CHECK(found.tensors[1].shape == index.tensors[1].shape);
  CHECK(found.files[1].rest == 2);
  CHECK(found.pieces[3].checksums == index.pieces[3].checksums);
  CHECK(found.pieces[4].offset == 2980);
  CHECK(encode_index(found) == encode_index(index));
}

TEST_CASE("An index that says what cannot be is refused, though its sum is right") {
  struct Case {
    const char* what;
    std::function<void(CheckpointIndex&)> change;
  };
  const std::vector<Case> cases = {
      {"a piece of tensor 1099511627776 of 3", [](auto& i) { i.pieces[0].tensor = size_t{1} << 40; }},
      {"tiles are of no size", [](auto& i) { i.pieces[0].tiling.rows = 0; }},
      {"tiles are of no size", [](auto& i) { i.pieces[0].tiling.cols = -1; }},
      {"tiles are of no size", [](auto& i) { i.pieces[0].tiling.rows = int64_t{1} << 62; }},
      {"not inside its shape",
       [](auto& i) {
         i.pieces[0].rectangle.rows = {-2, 2};
       }},
      {"not inside its shape", [](auto& i) { i.pieces[1].rectangle.rows.end = 7; }},
      {"not inside its shape",
       [](auto& i) {
         i.pieces[2].rectangle.cols = {4, 4};
       }},
      {"not inside its shape",
       [](auto& i) {
         i.pieces[2].rectangle.cols = {4, INT64_MIN};
       }},
      {"not as many checksums as tiles", [](auto& i) { i.pieces[3].checksums.pop_back(); }},
      {"not as many checksums as tiles", [](auto& i) { i.pieces[3].checksums.push_back(0); }},
      {"its file is not in the index", [](auto& i) { i.pieces[3].rank = 2; }},
      {"not inside its file", [](auto& i) { i.pieces[4].offset = 2981; }},
      {"not inside its file", [](auto& i) { i.pieces[4].offset = -4; }},
      {"not inside its file", [](auto& i) { i.pieces[4].offset = INT64_MAX; }},
      {"not inside its file", [](auto& i) { i.files[1].bytes = 2999; }},
      {"lies where another piece does", [](auto& i) { i.pieces[2].offset = 804; }},
      {"written twice",
       [](auto& i) {
         i.pieces[1].rectangle.rows = {1, 5};
       }},
      {"what is before is missing",
       [](auto& i) {
         i.pieces[0].rectangle.rows = {0, 1}, i.pieces[0].checksums = {1};
       }},
      {"'model/norm': 0 rows written", [](auto& i) { i.pieces.pop_back(); }},
      {"neither whole rows nor columns",
       [](auto& i) {
         i.pieces[3].rectangle.rows = {0, 2}, i.pieces[3].checksums = {6, 7};
       }},
      {"'model/norm' has no shape that can be",
       [](auto& i) {
         i.tensors[2].shape = {5, 1, 1};
       }},
      {"'model/norm' has no shape that can be", [](auto& i) { i.tensors[2].shape = {}; }},
      {"'model/norm' has no shape that can be", [](auto& i) { i.tensors[2].shape = {0}; }},
      {"'model/norm' has no shape that can be",
       [](auto& i) {
         i.tensors[2].shape = {int64_t{1} << 40, 1 << 22};
       }},
      {"'model/rows' is there twice", [](auto& i) { i.tensors[2].name = "model/rows"; }},
      {"a tensor without a name", [](auto& i) { i.tensors[2].name = "a\nb"; }},
      {"a file of rank 0", [](auto& i) { i.files[1].rank = 0; }},
      {"a file of rank -1", [](auto& i) { i.files[1].rank = -1; }},
      {"out of range", [](auto& i) { i.info.step = -1; }},
      {"control characters", [](auto& i) { i.info.layout = "\x1b[2J"; }},
  };
  for (const Case& one : cases) {
    CheckpointIndex index = sound_index();
    one.change(index);
    require_error(ErrorKind::kData, {"here/index.bin", one.what},
                  [&] { decode_index(encode_index(index), "here/index.bin"); });
  }
}

TEST_CASE("A file of gigabytes that is no index takes no memory") {
  const TemporaryFolder folder;
  folder.write("index.bin", "something else");
  fs::resize_file(folder / "index.bin", int64_t{2} << 30);  // without blocks on the disk
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  require_error(ErrorKind::kData, {"index.bin: not the index of an invar checkpoint"},
                [&] { read_index(folder.path()); });
  ::getrusage(RUSAGE_SELF, &after);
  CHECK(after.ru_maxrss - before.ru_maxrss < 1 << 20);  // KiB
}

TEST_CASE("Bytes that are cut or changed, with or without a right sum, end in an error or in an index that can be") {
  const std::vector<std::byte> sound = encode_index(sound_index());
  const auto decode = [](const std::vector<std::byte>& bytes) {
    const auto error = error_of([&] { decode_index(bytes, "index.bin"); });
    if (error) CHECK((error->kind() == ErrorKind::kData && contains(error->what(), "index.bin")));
    return !error.has_value();
  };
  for (size_t size = 0; size < sound.size(); ++size) {
    std::vector<std::byte> cut(sound.begin(), sound.begin() + static_cast<int64_t>(size));
    CHECK_FALSE(decode(cut));
    if (size >= 4) CHECK_FALSE(decode(with_sum(cut)));
  }
  int accepted = 0;
  for (size_t at = 0; at < sound.size(); ++at) {
    for (const int change : {0x01, 0x80, 0xff}) {
      std::vector<std::byte> changed = sound;
      changed[at] ^= static_cast<std::byte>(change);
      CHECK_FALSE(decode(changed));
      accepted += decode(with_sum(changed)) ? 1 : 0;  // another sum of a tile, another step
    }
  }
  CHECK(accepted > 0);
}

namespace {

// A checkpoint of format 1, written by the invar that had no other: elements numbered, on two ranks.
struct Old {
  Old() { fs::copy(fs::path(INVAR_SOURCE_DIR) / "tests/unit/checkpoint/format_1", folder.path()); }

  // index.h5 by the library, and its sum made right.
  void change(const std::function<void(hid_t)>& action) {
    const hid_t file = H5Fopen((folder / "index.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    REQUIRE(file >= 0);
    action(file);
    H5Fclose(file);
    const InputFile changed((folder / "index.h5").string());
    folder.write("index.crc32", format("{} {:08x}\n", changed.size(), crc32_of(changed, {0, changed.size()})));
  }
  void change_table(const std::string& name, size_t at, int64_t value) {
    change([&](hid_t file) {
      const hid_t table = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
      const hid_t space = H5Dget_space(table);
      std::vector<int64_t> values(static_cast<size_t>(H5Sget_simple_extent_npoints(space)));
      H5Dread(table, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
      values.at(at) = value;
      CHECK(H5Dwrite(table, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0);
      H5Sclose(space);
      H5Dclose(table);
    });
  }

  TemporaryFolder folder;
};

}  // namespace

TEST_CASE("A checkpoint of format 1 is read to the bit") {
  const Old old;
  const CheckpointReader reader(old.folder.path());
  reader.verify();
  CHECK(reader.index().version == 1);
  CHECK(reader.info() == CheckpointInfo{7, 28, 280, 1, true, "train:\n  steps: 9\n", "tensor 2 x data 1",
                                        "version 1\nleaves 8\n", "0123456789abcdef"});
  const std::vector<std::pair<std::string, std::vector<int64_t>>> tensors = {{"model/rows", {7, 13}},
                                                                             {"model/columns", {3, 136}},
                                                                             {"model/blocks", {2, 128}},
                                                                             {"model/norm", {5}},
                                                                             {"optimizer/exp_avg/rows", {7, 13}}};
  REQUIRE(reader.index().tensors.size() == tensors.size());
  for (const auto& [name, shape] : tensors) {
    INFO(name);
    std::vector<float> values(static_cast<size_t>(shape[0] * (shape.size() == 1 ? 1 : shape[1]))), expected(values);
    std::iota(expected.begin(), expected.end(), 0.0f);
    reader.read_rows(name, {0, shape[0]}, values);
    CHECK(values == expected);
  }
}

TEST_CASE("An attribute that is an array is refused, though all sums are right") {
  Old old;
  old.change([](hid_t file) {
    const std::vector<int64_t> many(64, -1);
    const hsize_t count = many.size();
    const hid_t space = H5Screate_simple(1, &count, nullptr);
    H5Adelete(file, "step");
    const hid_t attribute = H5Acreate2(file, "step", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    CHECK(H5Awrite(attribute, H5T_NATIVE_INT64, many.data()) >= 0);
    H5Aclose(attribute);
    H5Sclose(space);
  });
  require_error(ErrorKind::kData, {"index.h5", "attribute 'step' has 64 values"},
                [&] { CheckpointReader reader(old.folder.path()); });
}

TEST_CASE("Tables of format 1 that say what cannot be are refused, though all sums are right") {
  struct Case {
    const char* table;
    size_t at;
    int64_t value;
    const char* what;
  };
  // A row of index/pieces: tensor, rank, first and last row and column, tile rows and columns, first checksum.
  const Case cases[] = {{"index/pieces", 0, int64_t{1} << 40, "a piece of tensor 1099511627776"},
                        {"index/pieces", 0, -1, "a piece of tensor -1"},
                        {"index/pieces", 1, int64_t{1} << 40, "rank 1099511627776"},
                        {"index/pieces", 1, 77, "its file is not in the index"},
                        {"index/pieces", 2, -1, "dataset 'model/rows@-1,0': not in the file"},
                        {"index/pieces", 3, 4, "is f32 (3, 13), f32 (4, 13) in the index"},
                        {"index/pieces", 6, 0, "tiles are of no size"},
                        {"index/pieces", 7, 0, "tiles are of no size"},
                        {"index/pieces", 17, int64_t{1} << 40, "checksums are out of order"},
                        {"index/pieces", 17, -1, "checksums are out of order"},
                        {"index/shapes", 0, 8, "its shape is (8, 13)"},
                        {"index/shapes", 1, -2, "no shape that can be"},
                        {"index/files", 0, 5, "shard_00005.h5: cannot be opened"},
                        {"index/files", 1, 5, "shard_00000.h5: has 7632 bytes, was written with 5"}};
  for (const Case& one : cases) {
    Old old;
    INFO(one.table << " " << one.at << " " << one.value);
    old.change_table(one.table, one.at, one.value);
    require_error(ErrorKind::kData, {".h5: ", one.what}, [&] { CheckpointReader reader(old.folder.path()); });
  }
}

TEST_CASE("Eight bytes ff anywhere in a shard of format 1 end in an error, or change no value") {
  const Old old;
  const fs::path shard = old.folder / "shard_00001.h5";
  const std::string sound = read_file(shard);
  int refused = 0;
  for (size_t at = 0; at + 8 <= sound.size(); at += 8) {
    std::string damaged = sound;
    damaged.replace(at, 8, 8, '\xff');
    write_file(shard, damaged);
    INFO("at byte " << at);
    const auto error = error_of([&] { CheckpointReader(old.folder.path()).verify(); });
    if (error) CHECK((error->kind() == ErrorKind::kData && contains(error->what(), "shard_00001.h5")));
    refused += error ? 1 : 0;
    if (at == 128) CHECK(error.has_value());
  }
  CHECK(refused > 300);
}
