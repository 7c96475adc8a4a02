#include "checkpoint/hdf5_file.h"

#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "support/errors.h"
#include "support/hdf5_library.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

using Shape = std::vector<int64_t>;

std::vector<float> counting(int64_t n, float first = 0) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), first);
  return values;
}

template <class T>
void write_one(Hdf5Writer& writer, const std::string& name, const Shape& shape, const std::vector<T>& values) {
  writer.write<T>(name, shape, values);
}

template <class T>
std::vector<T> read_all(const Hdf5Reader& reader, const std::string& name) {
  const Hdf5Info info = reader.info(name);
  std::vector<T> out(static_cast<size_t>(info.rows() * info.cols()));
  reader.read_rows<T>(name, {0, info.rows()}, out);
  return out;
}

std::string sound_file(const TemporaryFolder& folder, const std::string& name = "sound.h5") {
  Hdf5Writer writer(folder / name);
  write_one<float>(writer, "x", {30, 7}, counting(210));
  writer.finish();
  return (folder / name).string();
}

}  // namespace

TEST_CASE("What is written is read: types, shapes, names with dots, attributes") {
  const TemporaryFolder folder;
  const std::vector<double> doubles = {1.0 / 3.0, -0.0, 1e300};
  const std::vector<int64_t> wide = {-1, int64_t{1} << 60};
  {
    Hdf5Writer writer(folder / "a.h5");
    write_one<float>(writer, "grad.model.layers.0.w", {2, 3, 4}, counting(24));
    write_one<double>(writer, "loss", {3}, doubles);
    write_one<int32_t>(writer, "tokens", {2, 2}, {1, -2, 3, 4});
    write_one<int64_t>(writer, "wide", {2, 1}, wide);
    write_one<float>(writer, "none", {0, 4}, {});
    write_one<float>(writer, "no columns", {4, 0}, {});
    writer.set_attribute("layout", "tensor 2 · data 1");
    writer.set_attribute("empty", "");
    writer.set_attribute("step", int64_t{7});
    CHECK_FALSE(std::filesystem::exists(folder / "a.h5"));  // not before it is complete
    writer.finish();
  }
  CHECK_FALSE(std::filesystem::exists(folder / "a.h5.tmp"));
  const Hdf5Reader reader(folder / "a.h5");
  CHECK(reader.names() ==
        std::vector<std::string>{"grad.model.layers.0.w", "loss", "no columns", "none", "tokens", "wide"});
  CHECK(reader.info("grad.model.layers.0.w").shape == Shape{2, 3, 4});
  CHECK(reader.info("grad.model.layers.0.w").rows() == 6);
  CHECK(reader.info("grad.model.layers.0.w").cols() == 4);
  CHECK(reader.info("loss").dtype == DType::kF64);
  CHECK(reader.info("loss").cols() == 1);
  CHECK(reader.info("tokens").dtype == DType::kI32);
  CHECK(reader.info("none").shape == Shape{0, 4});
  CHECK(reader.read_f32("grad.model.layers.0.w") == counting(24));
  CHECK(reader.read_f32("none").empty());
  CHECK(read_all<double>(reader, "loss") == doubles);
  CHECK(read_all<int64_t>(reader, "wide") == wide);
  CHECK(read_all<int64_t>(reader, "tokens") == std::vector<int64_t>{1, -2, 3, 4});  // converted
  CHECK(read_all<double>(reader, "tokens") == std::vector<double>{1, -2, 3, 4});
  CHECK(reader.contains("loss"));
  CHECK_FALSE(reader.contains("los"));
  CHECK(reader.text_attribute("layout") == "tensor 2 · data 1");
  CHECK(reader.text_attribute("empty") == "");
  CHECK(reader.integer_attribute("step") == 7);
  CHECK_FALSE(reader.text_attribute("other").has_value());
  CHECK_FALSE(reader.integer_attribute("other").has_value());
}

TEST_CASE("Rows of the matrix view, in any pieces, at any number of dims") {
  for (const Shape& shape :
       {Shape{12}, Shape{12, 1}, Shape{12, 3}, Shape{3, 4, 2}, Shape{2, 3, 2, 5}, Shape{12, 1, 3}}) {
    const int64_t n = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    const std::vector<float> values = counting(n, 1);
    const auto part = [&](int64_t begin, int64_t end) {
      const int64_t cols = n / 12;
      return std::vector<float>(values.begin() + begin * cols, values.begin() + end * cols);
    };
    for (int64_t first = 0; first <= 12; ++first) {
      for (int64_t second = first; second <= 12; ++second) {
        INFO("dims " << shape.size() << ", cuts " << first << " and " << second);
        const TemporaryFolder folder;
        Hdf5Writer writer(folder / "a.h5");
        writer.create("x", DType::kF32, shape);
        writer.write_rows<float>("x", second, part(second, 12));
        writer.write_rows<float>("x", 0, part(0, first));
        writer.write_rows<float>("x", first, part(first, second));
        writer.finish();
        const Hdf5Reader reader(folder / "a.h5");
        CHECK(reader.read_f32("x") == values);
        std::vector<float> rows(part(first, second).size());
        reader.read_rows<float>("x", {first, second}, rows);
        CHECK(rows == part(first, second));
      }
    }
  }
}

TEST_CASE("Equal calls write equal bytes") {
  const TemporaryFolder folder;
  sound_file(folder, "a.h5");
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // time stamps would count seconds
  sound_file(folder, "b.h5");
  CHECK((folder.read("a.h5") == folder.read("b.h5")));
}

TEST_CASE("A writer that does not finish leaves nothing, and an old file as it was") {
  const TemporaryFolder folder;
  const std::string old = folder.read(std::filesystem::path(sound_file(folder)).filename().string());
  {
    Hdf5Writer writer(folder / "sound.h5");
    write_one<float>(writer, "y", {1}, {1});
  }
  CHECK((folder.read("sound.h5") == old));
  Hdf5Writer writer(folder / "new.h5");
  writer.create("y", DType::kF32, Shape{4, 2});
  writer.write_rows<float>("y", 1, counting(4));
  require_error(ErrorKind::kFault, {"new.h5", "'y'", "2 rows of 4 not written"}, [&] { writer.finish(); });
  CHECK_FALSE(std::filesystem::exists(folder / "new.h5"));
}

TEST_CASE("Files that cannot be read are refused by name") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& file, const std::string& reason) {
    require_error(ErrorKind::kData, {file, reason}, [&] { Hdf5Reader reader(folder / file); });
  };
  refused("nowhere.h5", "No such file");
  folder.write("text.h5", "step 1\n");
  refused("text.h5", "not an HDF5 file");
  folder.write("empty.h5", "");
  refused("empty.h5", "not an HDF5 file");
  std::filesystem::create_directory(folder / "folder.h5");
  refused("folder.h5", "not a regular file");
  const std::string whole = folder.read(std::filesystem::path(sound_file(folder)).filename().string());
  folder.write("cut.h5", whole.substr(0, whole.size() - 100));
  refused("cut.h5", "truncated");
  folder.write("head.h5", whole.substr(0, 64));
  refused("head.h5", "not an HDF5 file");
  folder.write("cut.h5", whole.substr(0, 96));
  refused("cut.h5", "truncated");
}

TEST_CASE("Datasets that are not as expected are refused by file and name") {
  const TemporaryFolder folder;
  {
    Hdf5Writer writer(folder / "a.h5");
    write_one<float>(writer, "x", {3, 2}, counting(6));
    writer.set_attribute("step", int64_t{1});
    writer.finish();
  }
  const Hdf5Reader reader(folder / "a.h5");
  std::vector<float> out(2);
  std::vector<int64_t> integers(2);
  require_error(ErrorKind::kData, {"a.h5", "'y'", "not in the file"}, [&] { reader.info("y"); });
  require_error(ErrorKind::kData, {"a.h5", "'y'", "not in the file"}, [&] {
    reader.read_rows<float>("y", {0, 1}, out);
  });
  require_error(ErrorKind::kData, {"a.h5", "'x'", "rows [3, 4)", "(3, 2)"}, [&] {
    reader.read_rows<float>("x", {3, 4}, out);
  });
  require_error(ErrorKind::kData, {"a.h5", "'x'", "rows [-1, 0)"}, [&] { reader.read_rows<float>("x", {-1, 0}, out); });
  require_error(ErrorKind::kData, {"a.h5", "'x'", "is f32, integers are needed"}, [&] {
    reader.read_rows<int64_t>("x", {0, 1}, integers);
  });
  require_error(ErrorKind::kData, {"a.h5", "attribute 'step'", "another type"}, [&] { reader.text_attribute("step"); });
}

TEST_CASE("A virtual dataset shows rectangles of other files to the library; groups and texts are read") {
  const TemporaryFolder folder;
  for (const int part : {0, 1}) {
    Hdf5Writer writer(folder / format("part{}.h5", part));
    write_one<float>(writer, "a/x", {3, 2}, counting(6, static_cast<float>(10 * part)));
    writer.finish();
  }
  const std::vector<std::string> names = {"one", "", "longer than the others"};
  {
    Hdf5Writer writer(folder / "index.h5");
    const std::vector<Hdf5Source> sources = {{"part0.h5", "a/x", {0, 0}, {3, 2}}, {"part1.h5", "a/x", {0, 3}, {3, 2}}};
    writer.create_virtual("b/whole", DType::kF32, Shape{3, 5}, sources);
    writer.write_strings("names", names);
    writer.finish();
  }
  CHECK(read_by_library(folder / "index.h5", "b/whole") ==
        std::vector<float>{0, 1, 0, 10, 11, 2, 3, 0, 12, 13, 4, 5, 0, 14, 15});
  const Hdf5Reader reader(folder / "index.h5");
  CHECK(Hdf5Reader(folder / "part1.h5").read_f32("a/x") == counting(6, 10));
  CHECK(reader.read_strings("names") == names);
  CHECK(reader.info("b/whole").shape == Shape{3, 5});
  require_error(ErrorKind::kData, {"index.h5", "'b/whole'", "from other files"}, [&] { reader.read_f32("b/whole"); });
  require_error(ErrorKind::kData, {"'b/whole'", "not a list of texts"}, [&] { reader.read_strings("b/whole"); });
}

TEST_CASE("Several threads write and read their own files at once") {
  const TemporaryFolder folder;
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (size_t i = 0; i < right.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        const auto path = folder / format("{}_{}.h5", i, round);
        Hdf5Writer writer(path);
        write_one<float>(writer, "x", {50, 7}, counting(350, static_cast<float>(i)));
        writer.finish();
        right[i] += Hdf5Reader(path).read_f32("x") == counting(350, static_cast<float>(i)) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == std::vector<int>{20, 20, 20, 20});
}

TEST_CASE("Misuse of a writer is a fault") {
  const TemporaryFolder folder;
  Hdf5Writer writer(folder / "a.h5");
  writer.create("x", DType::kF32, Shape{2, 2});
  const std::vector<float> three(3);
  CHECK_THROWS_AS(writer.create("x", DType::kF32, Shape{1}), Error);
  CHECK_THROWS_AS(writer.create("b", DType::kBF16, Shape{1}), Error);
  CHECK_THROWS_AS(writer.write_rows<float>("x", 0, three), Error);                      // not whole rows
  CHECK_THROWS_AS(writer.write_rows<float>("x", 1, counting(4)), Error);                // beyond the end
  CHECK_THROWS_AS(writer.write_rows<int64_t>("x", 0, std::vector<int64_t>(4)), Error);  // another type
  CHECK_THROWS_AS(writer.write_rows<float>("y", 0, counting(4)), Error);
  require_error(ErrorKind::kFault, {"nowhere/a.h5.tmp", "No such file"},
                [&] { Hdf5Writer w(folder / "nowhere/a.h5"); });
}

TEST_CASE("A full disk is reported and leaves nothing") {
  const TemporaryFolder folder;
  struct rlimit old {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = old;
  small.rlim_cur = 100'000;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::optional<Error> error = error_of([&] {
    Hdf5Writer writer(folder / "a.h5");
    write_one<float>(writer, "fits", {100}, counting(100));
    write_one<float>(writer, "too large", {1000, 100}, counting(100'000));
    writer.finish();
  });
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, old_handler);
  REQUIRE(error.has_value());
  CHECK(error->kind() == ErrorKind::kFault);
  CHECK(contains(error->what(), "a.h5: dataset 'too large': cannot be written: File too large"));
  CHECK(std::filesystem::is_empty(folder.path()));
  const Hdf5Reader reader(sound_file(folder));  // the library still works
  CHECK(reader.read_f32("x") == counting(210));
}
