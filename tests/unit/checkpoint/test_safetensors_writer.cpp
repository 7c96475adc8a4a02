#include <cstdlib>

#include "checkpoint/safetensors.h"
#include "core/pending_file.h"
#include "safetensors_files.h"
#include "support/errors.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("A small file has exactly these bytes") {
  const TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  SafetensorsWriter writer(path, {{"b", DType::kBF16, {3}}, {"a", DType::kF32, {2, 2}}});
  const std::vector<float> upper{1, 2}, lower{3, 4}, vector{1.0f, 1.00390625f, -2.0f};
  writer.write_rows("a", 1, 1, lower);
  writer.write_rows("b", 0, 3, vector);
  writer.write_rows("a", 0, 1, upper);
  CHECK_FALSE(std::filesystem::exists(path));
  writer.finish();

  // fp32 lies before bf16; the header is padded to a multiple of 8; 1 + 2⁻⁸ is a tie and rounds to even.
  std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                       R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  const std::string data = bytes_of<float>({1, 2, 3, 4}) + bytes_of<uint16_t>({0x3f80, 0x3f80, 0xc000});
  CHECK(read_file(path) == safetensors_bytes(header, data));
  CHECK_FALSE(std::filesystem::exists(folder / "w.safetensors.tmp"));
}

TEST_CASE("What is written in pieces is read back") {
  const TemporaryFolder folder;
  constexpr int64_t kRows = 1000, kCols = 700;  // more than one chunk of the bf16 conversion
  std::vector<float> values(kRows * kCols);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int64_t>(i) - 350000) * 0.37f;
  SafetensorsWriter writer(folder / "m.safetensors", {{"f32", DType::kF32, {kRows, 70, 10}},
                                                      {"bf16", DType::kBF16, {kRows, kCols}},
                                                      {"scalar", DType::kF32, {}},
                                                      {"empty", DType::kBF16, {4, 0}}});
  const auto rows = [&](int64_t begin, int64_t end) {
    return std::span<const float>(values).subspan(static_cast<size_t>(begin * kCols),
                                                  static_cast<size_t>((end - begin) * kCols));
  };
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{400, 1000}, {0, 100}, {250, 400}, {100, 250}}) {
    writer.write_rows("f32", begin, end - begin, rows(begin, end));
    writer.write_rows("bf16", begin, end - begin, rows(begin, end));
  }
  writer.write_rows("f32", 10, 0, {});
  writer.write_rows("scalar", 0, 1, std::vector<float>{42});
  writer.finish();

  const SafetensorsReader reader(folder / "m.safetensors");
  CHECK(reader.names() == std::vector<std::string>{"bf16", "empty", "f32", "scalar"});
  CHECK(reader.info("f32").shape == std::vector<int64_t>{kRows, 70, 10});
  std::vector<float> out(values.size());
  reader.read_rows("f32", {0, kRows}, {0, kCols}, out);
  CHECK(out == values);
  reader.read_rows("bf16", {0, kRows}, {0, kCols}, out);
  size_t wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) wrong += out[i] != static_cast<float>(BF16(values[i])) ? 1 : 0;
  CHECK(wrong == 0);
  CHECK(out != values);  // bf16 did round
}

TEST_CASE("Rows are written once, all of them, and only where they belong") {
  const TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  const std::vector<float> values(40);
  const auto some = [&](size_t count) { return std::span<const float>(values).first(count); };
  SafetensorsWriter writer(path, {{"w", DType::kF32, {10, 2}}, {"v", DType::kBF16, {4}}});
  const auto refused = [&](const std::vector<std::string>& parts, const std::function<void()>& action) {
    require_error(ErrorKind::kFault, parts, action);
  };

  refused({"'x' was not declared"}, [&] { writer.write_rows("x", 0, 1, some(2)); });
  refused({"'w': rows [8, 11) of 10"}, [&] { writer.write_rows("w", 8, 3, some(6)); });
  refused({"'w': rows [-1, 0) of 10"}, [&] { writer.write_rows("w", -1, 1, some(2)); });
  refused({"'w': 3 values for 2 rows of 2"}, [&] { writer.write_rows("w", 0, 2, some(3)); });

  writer.write_rows("w", 3, 3, some(6));
  for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {5, 2}, {4, 1}, {3, 3}, {2, 6}}) {
    refused({"'w': rows [" + std::to_string(first), "meet rows that were written before"},
            [&, f = first, n = count] { writer.write_rows("w", f, n, some(static_cast<size_t>(n) * 2)); });
  }
  writer.write_rows("v", 0, 4, some(4));
  refused({path.string(), "'w' is incomplete: row 0 of 10"}, [&] { writer.finish(); });
  writer.write_rows("w", 0, 3, some(6));
  refused({"'w' is incomplete: row 6 of 10"}, [&] { writer.finish(); });
  writer.write_rows("w", 7, 3, some(6));
  refused({"'w' is incomplete: row 6 of 10"}, [&] { writer.finish(); });
  CHECK_FALSE(std::filesystem::exists(path));
  writer.write_rows("w", 6, 1, some(2));
  writer.finish();
  CHECK(std::filesystem::exists(path));
  refused({"already published"}, [&] { writer.finish(); });
}

TEST_CASE("Unsound declarations are refused and leave no file") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& part, const std::vector<SafetensorsSpec>& tensors) {
    require_error(ErrorKind::kFault, {part}, [&] { SafetensorsWriter writer(folder / "w.safetensors", tensors); });
  };
  refused("is i64: f32 or bf16 can be written", {{"w", DType::kI64, {1}}});
  refused("'w' is used twice", {{"w", DType::kF32, {1}}, {"w", DType::kF32, {1}}});
  refused("'__metadata__' is used twice or reserved", {{"__metadata__", DType::kF32, {1}}});
  refused("negative dim", {{"w", DType::kF32, {-1}}});
  refused("too large", {{"w", DType::kF32, {int64_t{1} << 61, 2}}});
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("An unfinished writer leaves nothing, and an older file as it was") {
  const TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  write_file(path, "older");
  {
    SafetensorsWriter writer(path, {{"w", DType::kF32, {2}}});
    writer.write_rows("w", 0, 1, std::vector<float>{1});
    CHECK(std::filesystem::exists(folder / "w.safetensors.tmp"));
  }
  CHECK_FALSE(std::filesystem::exists(folder / "w.safetensors.tmp"));
  CHECK(read_file(path) == "older");
  SafetensorsWriter writer(path, {{"w", DType::kF32, {1}}});
  writer.write_rows("w", 0, 1, std::vector<float>{1});
  writer.finish();
  CHECK(SafetensorsReader(path).contains("w"));
}

TEST_CASE("System errors name the file") {
  const TemporaryFolder folder;
  require_error(ErrorKind::kFault, {"absent/w.safetensors.tmp", "cannot be created"}, [&] {
    SafetensorsWriter writer(folder / "absent/w.safetensors", {{"w", DType::kF32, {1}}});
  });
  SafetensorsWriter writer(folder / "full.safetensors", {{"w", DType::kF32, {1000}}});
  const FileSizeLimit full(1000);
  require_error(ErrorKind::kFault, {"full.safetensors.tmp: cannot be written: File too large"}, {"ulimit -f"},
                [&] { writer.write_rows("w", 0, 1000, std::vector<float>(1000)); });
}

TEST_CASE("Rows beyond 4 GiB are written at their place") {
  const TemporaryFolder folder;
  const int64_t rows = (int64_t{3} << 30) / 256;
  SafetensorsWriter writer(folder / "w.safetensors", {{"w", DType::kBF16, {rows, 256}}});  // 6 GiB, never filled
  std::vector<float> row(256);
  row.back() = -2.0f;
  writer.write_rows("w", rows - 1, 1, row);
  const auto path = folder / "w.safetensors.tmp";
  CHECK(std::filesystem::file_size(path) > (uintmax_t{6} << 30));
  std::ifstream stream(path, std::ios::binary);
  stream.seekg(-2, std::ios::end);
  CHECK(std::string(std::istreambuf_iterator<char>(stream), {}) == bytes_of<uint16_t>({0xc000}));
}

// INVAR_PYTHON chooses the interpreter.
TEST_CASE("The Python package and this library read each other's files") {
  const char* chosen = std::getenv("INVAR_PYTHON");
  const std::string python = chosen != nullptr ? chosen : "python3";
  if (std::system((python + " -c 'import numpy, safetensors.numpy' 2>/dev/null").c_str()) != 0) {
    WARN("SKIPPED: " << python << " has no safetensors package");
    return;
  }
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "ours.safetensors", {{"m", DType::kF32, {2, 3}}, {"v", DType::kF32, {2}}});
  writer.write_rows("m", 0, 2, std::vector<float>{1, 2, 3, 4, 5, 6});
  writer.write_rows("v", 0, 2, std::vector<float>{-1, 0.5f});
  writer.finish();
  write_file(folder / "exchange.py", R"(
import sys
import numpy
from safetensors import safe_open
from safetensors.numpy import save_file
folder = sys.argv[1]
with safe_open(folder + "/ours.safetensors", "numpy") as file:
    assert file.metadata() == {"format": "pt"}, file.metadata()
    assert sorted(file.keys()) == ["m", "v"]
    m, v = file.get_tensor("m"), file.get_tensor("v")
assert m.dtype == numpy.float32 and m.tolist() == [[1, 2, 3], [4, 5, 6]], m
assert v.tolist() == [-1, 0.5], v
save_file({"half": v.astype(numpy.float16), "double": m.T.astype(numpy.float64).copy(),
           "count": numpy.array([2**40, -1])}, folder + "/theirs.safetensors", {"by": "python"})
)");
  REQUIRE(std::system((python + " " + (folder / "exchange.py").string() + " " + folder.path().string()).c_str()) == 0);
  const SafetensorsReader reader(folder / "theirs.safetensors");
  std::vector<float> half(2), column(3);
  reader.read_rows("half", {0, 2}, {0, 1}, half);
  reader.read_rows("double", {0, 3}, {1, 2}, column);
  CHECK(half == std::vector<float>{-1, 0.5f});
  CHECK(column == std::vector<float>{4, 5, 6});
  CHECK(reader.read_i64("count") == std::vector<int64_t>{int64_t{1} << 40, -1});
}
