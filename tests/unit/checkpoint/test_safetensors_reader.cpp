#include <cmath>
#include <limits>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "safetensors_files.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

std::vector<float> read_all(const SafetensorsReader& reader, const std::string& name) {
  const auto& info = reader.info(name);
  std::vector<float> out(static_cast<size_t>(info.rows() * info.cols()));
  reader.read_rows(name, {0, info.rows()}, {0, info.cols()}, out);
  return out;
}

// A file whose only tensor 'w' has this dtype, shape and data.
std::filesystem::path one_tensor(const TemporaryFolder& folder, const std::string& dtype, const std::string& shape,
                                 const std::string& data) {
  const std::string header = R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[0,)" +
                             std::to_string(data.size()) + "]}}";
  write_file(folder / "one.safetensors", safetensors_bytes(header, data));
  return folder / "one.safetensors";
}

}  // namespace

TEST_CASE("A rectangle is read from a matrix, in any part and at an odd address") {
  const TemporaryFolder folder;
  std::vector<float> values(6 * 5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) + 0.25f;
  // One byte before it, so that floats lie unaligned in the mapping.
  const std::string header =
      R"({"flag":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"F32","shape":[6,5],"data_offsets":[1,121]}})";
  write_file(folder / "m.safetensors", safetensors_bytes(header, std::string(1, 'x') + bytes_of(values)));
  const SafetensorsReader reader(folder / "m.safetensors");

  int rectangles = 0;
  for (int64_t r0 = 0; r0 <= 6; ++r0) {
    for (int64_t r1 = r0; r1 <= 6; ++r1) {
      for (int64_t c0 = 0; c0 <= 5; ++c0) {
        for (int64_t c1 = c0; c1 <= 5; ++c1) {
          std::vector<float> expected;
          for (int64_t r = r0; r < r1; ++r) {
            for (int64_t c = c0; c < c1; ++c) expected.push_back(static_cast<float>(r * 5 + c) + 0.25f);
          }
          std::vector<float> out(expected.size(), -1.0f);
          reader.read_rows("w", {r0, r1}, {c0, c1}, out);
          if (out != expected) FAIL("rows " << r0 << ".." << r1 << " columns " << c0 << ".." << c1);
          ++rectangles;
        }
      }
    }
  }
  CHECK(rectangles == 28 * 21);
}

TEST_CASE("Shapes of any rank are seen as rows × columns") {
  const TemporaryFolder folder;
  const std::string data = bytes_of<float>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  struct Case {
    const char* shape;
    int64_t rows, cols;
  };
  for (const auto& [shape, rows, cols] : {Case{"[12]", 12, 1}, Case{"[3,4]", 3, 4}, Case{"[2,3,2]", 2, 6}}) {
    const SafetensorsReader reader(one_tensor(folder, "F32", shape, data));
    CHECK(reader.info("w").rows() == rows);
    CHECK(reader.info("w").cols() == cols);
    std::vector<float> last_row(static_cast<size_t>(cols));
    reader.read_rows("w", {rows - 1, rows}, {0, cols}, last_row);
    CHECK(last_row.back() == 12.0f);
    CHECK(last_row.front() == static_cast<float>(12 - cols + 1));
  }
  const SafetensorsReader scalar(one_tensor(folder, "F32", "[]", bytes_of<float>({7})));
  CHECK(read_all(scalar, "w") == std::vector<float>{7});
  const SafetensorsReader empty(one_tensor(folder, "F32", "[0,4611686018427387904,8]", ""));
  CHECK(read_all(empty, "w").empty());
  // Whoever goes through its rows has none to go through.
  const SafetensorsReader endless(one_tensor(folder, "F32", "[4611686018427387904,0]", ""));
  CHECK((endless.info("w").rows() == 0 && endless.info("w").cols() == 0));
}

TEST_CASE("Every floating dtype is converted to fp32") {
  const TemporaryFolder folder;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();

  const SafetensorsReader bf16(one_tensor(folder, "BF16", "[4]", bytes_of<uint16_t>({0x3f80, 0xc049, 0x0001, 0xff80})));
  CHECK(read_all(bf16, "w") == std::vector<float>{1.0f, -3.140625f, 0x1p-133f, -kInfinity});

  const SafetensorsReader f64(one_tensor(folder, "F64", "[3]", bytes_of<double>({0.1, -1e300, 0x1.000001p0})));
  CHECK(read_all(f64, "w") == std::vector<float>{0.1f, -kInfinity, 1.0f});  // ties go to even

  const SafetensorsReader f16(one_tensor(
      folder, "F16", "[8]", bytes_of<uint16_t>({0x3c00, 0xc000, 0x7bff, 0x0400, 0x03ff, 0x8001, 0x8000, 0x7c00})));
  const auto half = read_all(f16, "w");
  CHECK(half == std::vector<float>{1.0f, -2.0f, 65504.0f, 0x1p-14f, 1023 * 0x1p-24f, -0x1p-24f, 0.0f, kInfinity});
  CHECK(std::signbit(half[6]));
}

TEST_CASE("All 65536 halves have their exact value") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = safetensors::half_to_float(static_cast<uint16_t>(bits));
    const int exponent = static_cast<int>((bits >> 10) & 31);
    const int mantissa = static_cast<int>(bits & 1023);
    double expected = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) expected = mantissa == 0 ? HUGE_VAL : NAN;
    if ((bits & 0x8000) != 0) expected = -expected;
    const bool same = std::isnan(expected)
                          ? std::isnan(value)
                          : static_cast<double>(value) == expected && std::signbit(value) == std::signbit(expected);
    if (!same) FAIL("half " << bits << " became " << value);
  }
}

TEST_CASE("Integers are read as such and refused as floats") {
  const TemporaryFolder folder;
  const int64_t large = int64_t{1} << 40;
  const SafetensorsReader i64(one_tensor(folder, "I64", "[1,3]", bytes_of<int64_t>({-1, large, 3})));
  CHECK(i64.read_i64("w") == std::vector<int64_t>{-1, large, 3});
  std::vector<float> out(3);
  require_error(ErrorKind::kData, {"one.safetensors", "'w'", "is I64"}, [&] {
    i64.read_rows("w", {0, 1}, {0, 3}, out);
  });
  const SafetensorsReader i32(one_tensor(folder, "I32", "[2]", bytes_of<int32_t>({-7, 8})));
  CHECK(i32.read_i64("w") == std::vector<int64_t>{-7, 8});
  const SafetensorsReader f32(one_tensor(folder, "F32", "[2]", bytes_of<float>({1, 2})));
  require_error(ErrorKind::kData, {"one.safetensors", "'w'", "is F32"}, [&] { (void)f32.read_i64("w"); });
}

TEST_CASE("Asking for what is not there is refused") {
  const TemporaryFolder folder;
  const SafetensorsReader reader(one_tensor(folder, "F32", "[2,3]", bytes_of<float>({1, 2, 3, 4, 5, 6})));
  CHECK(reader.contains("w"));
  CHECK_FALSE(reader.contains("v"));
  require_error(ErrorKind::kData, {"one.safetensors", "'v'", "not among its 1 tensors"},
                [&] { (void)reader.info("v"); });
  std::vector<float> out(6);
  for (const auto& [rows, cols] : std::vector<std::pair<Range, Range>>{
           {{0, 3}, {0, 2}}, {{0, 2}, {1, 4}}, {{-1, 1}, {0, 3}}, {{2, 0}, {0, 3}}, {{0, 2}, {-1, 2}}}) {
    require_error(ErrorKind::kData, {"one.safetensors", "'w'", "not all in its shape (2, 3)"},
                  [&, r = rows, c = cols] { reader.read_rows("w", r, c, out); });
  }
  require_error(ErrorKind::kFault, {"3 elements into a span of 6"}, [&] {
    reader.read_rows("w", {0, 1}, {0, 3}, out);
  });
}

TEST_CASE("A damaged file is refused with its name and the reason") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& bytes, std::vector<std::string> parts) {
    write_file(folder / "bad.safetensors", bytes);
    parts.push_back("bad.safetensors");
    require_error(ErrorKind::kData, parts, [&] { SafetensorsReader reader(folder / "bad.safetensors"); });
  };
  // The header's entry of 'w' and some data.
  const auto entry = [&](const std::string& fields, size_t data_bytes, std::vector<std::string> parts) {
    refused(safetensors_bytes(R"({"w":{)" + fields + "}}", std::string(data_bytes, 'x')), parts);
  };

  SECTION("length and JSON") {
    refused("", {"too short: 0 bytes"});
    refused("1234567", {"too short: 7 bytes"});
    refused(bytes_of<uint64_t>({0}) + "{}", {"its header has 0 bytes"});
    refused(bytes_of<uint64_t>({3}) + "{}", {"its header has 3 bytes, in a file of 10"});
    refused(bytes_of<uint64_t>({~uint64_t{0}}) + "{}", {"its header has 18446744073709551615 bytes"});
    refused(safetensors_bytes("{\"w\":", ""), {"not valid JSON"});
    refused(safetensors_bytes("not json", ""), {"not valid JSON"});
    refused(safetensors_bytes("[]", ""), {"not a JSON object"});
    refused(safetensors_bytes(R"({"w":{"dtype":"F32","shape":)" + std::string(100'000, '['), ""), {"64 levels deep"});
    refused(safetensors_bytes(R"({"w":{"dtype":"F32","shape":[1e400]}})", ""), {"w.shape[0] must be a number"});
    refused(safetensors_bytes(R"({"__metadata__":3})", ""), {"__metadata__ must be an object, not 3"});
    refused(safetensors_bytes(R"({"__metadata__":{"format":1}})", ""), {"__metadata__.format must be a string, not 1"});
  }
  SECTION("an entry") {
    refused(safetensors_bytes(R"({"w":[]})", ""), {"w must be an object, not []"});
    entry(R"("shape":[1],"data_offsets":[0,4])", 4, {"missing w.dtype"});
    entry(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])", 4, {"'w': unknown dtype 'F33'"});
    entry(R"("dtype":"F32","data_offsets":[0,4])", 4, {"missing w.shape"});
    entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])", 4, {"'w': its shape [-1] has a negative size"});
    entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])", 4, {"w.shape must be a list of integers, not [1.0]"});
    entry(R"("dtype":"F32","shape":[1])", 4, {"missing w.data_offsets"});
    entry(R"("dtype":"F32","shape":[1],"data_offsets":[4])", 4, {"'w': 'data_offsets' is not a pair"});
    entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615])", 4,
          {"w.data_offsets must be a list of integers"});
    entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 7,
          {"'w': bytes [0, 8) are out of range", "7 bytes of data"});
    entry(R"("dtype":"F32","shape":[1],"data_offsets":[8,4])", 8, {"bytes [8, 4) are out of range"});
    entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", 8, {"'w': F32 (1) does not fill its 8 bytes"});
    entry(R"("dtype":"BF16","shape":[2,2],"data_offsets":[0,4])", 4, {"BF16 (2, 2) does not fill its 4 bytes"});
    // 2³² · 2³² elements overflow to zero in 64 bits.
    entry(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0, {"does not fill its 0 bytes"});
    entry(R"("dtype":"F32\u001b[2J","shape":[1],"data_offsets":[0,4])", 4, {R"(unknown dtype 'F32\x1b[2J')"});
    refused(safetensors_bytes(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                              R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                              "ab"),
            {"w is given twice"});
  }
  SECTION("layout") {
    const auto pair = [&](const std::string& a, const std::string& b, size_t data_bytes) {
      return safetensors_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + a +
                                   R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}",
                               std::string(data_bytes, 'x'));
    };
    refused(pair("[0,2]", "[1,3]", 3), {"'b'", "overlaps", "at byte 1"});
    refused(pair("[2,4]", "[1,3]", 4), {"'b'", "a gap of 1 bytes"});
    refused(pair("[0,2]", "[3,5]", 5), {"'b'", "a gap of 1 bytes"});
    refused(pair("[0,2]", "[2,4]", 5), {"1 bytes follow the last tensor"});
    write_file(folder / "good.safetensors", pair("[2,4]", "[0,2]", 4));  // any order is fine
    CHECK(SafetensorsReader(folder / "good.safetensors").names() == std::vector<std::string>{"a", "b"});
  }
}

TEST_CASE("A file that shrinks while it is read ends the read with both sizes") {
  const TemporaryFolder folder;
  const auto path = one_tensor(folder, "F32", "[4096,4]", std::string(65536, 'x'));
  const SafetensorsReader reader(path);
  const std::string size = std::to_string(std::filesystem::file_size(path));
  std::filesystem::resize_file(path, 5000);
  std::vector<float> out(4096 * 4);
  require_error(ErrorKind::kData, {"one.safetensors", "has shrunk: " + size + " bytes when it was opened, 5000 now"},
                [&] {
                  reader.read_rows("w", {0, 4096}, {0, 4}, out);
                });
  reader.read_rows("w", {0, 16}, {0, 4}, std::span(out).first(64));  // what is left can be read
}

TEST_CASE("A path that is no model is refused") {
  const TemporaryFolder folder;
  require_error(ErrorKind::kData, {"absent.safetensors", "cannot be opened"},
                [&] { SafetensorsReader reader(folder / "absent.safetensors"); });
  require_error(ErrorKind::kData, {folder.path().string(), "holds neither model.safetensors"},
                [&] { SafetensorsReader reader(folder.path()); });
  require_error(ErrorKind::kData, {"/dev/null", "not a regular file"}, [&] { SafetensorsReader reader("/dev/null"); });
}

TEST_CASE("Data beyond 4 GiB is found") {
  const TemporaryFolder folder;
  const int64_t rows = (int64_t{5} << 30) / 1024;  // 5 GiB, a hole but for the last row
  const std::string header = R"({"w":{"dtype":"F32","shape":[)" + std::to_string(rows) + R"(,256],"data_offsets":[0,)" +
                             std::to_string(rows * 1024) + "]}}";
  const auto path = folder / "large.safetensors";
  write_file(path, safetensors_bytes(header, ""));
  const auto data_start = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, data_start + static_cast<uintmax_t>(rows) * 1024);
  {
    std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
    stream.seekp(-8, std::ios::end);
    stream << bytes_of<float>({1.5f, 2.5f});
  }
  const SafetensorsReader reader(path);
  std::vector<float> tail(6, -1.0f);
  reader.read_rows("w", {rows - 2, rows}, {253, 256}, tail);
  CHECK(tail == std::vector<float>{0, 0, 0, 0, 1.5f, 2.5f});
}

TEST_CASE("The reference results are read") {
  const std::filesystem::path folder = INVAR_SOURCE_DIR "/tests/reference/qwen3";
  const SafetensorsReader model(folder);  // model.safetensors of a Hugging Face folder
  CHECK(model.names().size() == 46);      // 11 · 4 layers + 2, tied
  CHECK(model.info("model.layers.3.mlp.down_proj.weight").shape == std::vector<int64_t>{48, 96});
  for (const auto& name : model.names()) {
    for (const float value : read_all(model, name)) REQUIRE(std::isfinite(value));
  }

  const SafetensorsReader expected(folder / "expected.safetensors");
  const auto tokens = expected.read_i64("tokens");
  CHECK(tokens.size() == 10 * 4 * 33);
  for (const int64_t token : tokens) REQUIRE((0 <= token && token < 250));

  // The file's own loss follows from its own logits: bytes, dtypes and order are right.
  const auto logits = read_all(expected, "logits");
  double sum = 0;
  for (size_t row = 0; row < 4 * 32; ++row) {
    double normalizer = 0;
    for (size_t v = 0; v < 250; ++v) normalizer += std::exp(static_cast<double>(logits[row * 250 + v]));
    const auto target = static_cast<size_t>(tokens[row / 32 * 33 + row % 32 + 1]);
    sum += std::log(normalizer) - static_cast<double>(logits[row * 250 + target]);
  }
  CHECK(sum / (4 * 32) == Approx(read_all(expected, "loss")[0]).epsilon(1e-5));
}
