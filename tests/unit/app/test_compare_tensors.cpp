#include "app/compare_tensors.h"

#include "app/compare_report.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/safetensors.h"
#include "support/bytes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

using Shape = std::vector<int64_t>;
using Values = std::vector<float>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Named {
  std::string name;
  Shape shape;
  Values values;
};

// An HDF5 file of f32 tensors, opened.
std::unique_ptr<TensorFile> dump_of(const TemporaryFolder& folder, const std::string& file,
                                    const std::vector<Named>& tensors) {
  Hdf5Writer writer(folder / file);
  for (const Named& tensor : tensors) writer.write<float>(tensor.name, tensor.shape, tensor.values);
  writer.finish();
  return open_dump(folder / file);
}

FileDifference compare(const std::vector<Named>& a, const std::vector<Named>& b, const Tolerance& tolerance = {}) {
  const TemporaryFolder folder;
  return compare_tensors(*dump_of(folder, "a.h5", a), *dump_of(folder, "b.h5", b), tolerance);
}

TensorDifference compare_values(const Values& a, const Values& b, const Tolerance& tolerance = {}) {
  const Shape shape{std::ssize(a)};
  const FileDifference found = compare({{"x", shape, a}}, {{"x", shape, b}}, tolerance);
  const TensorDifference& only = found.tensors.at(0);
  CHECK(found.inside() == (only.verdict != Verdict::kOutside && !only.is_vacuous()));
  return only;
}

constexpr Tolerance kExact{0, 0, true};

int64_t lines_with(const std::vector<std::string>& lines, const std::string& text) {
  return std::count_if(lines.begin(), lines.end(), [&](const auto& line) { return contains(line, text); });
}

std::vector<std::string> names_of(const FileDifference& difference) {
  std::vector<std::string> names;
  for (const TensorDifference& tensor : difference.tensors) names.push_back(tensor.name);
  return names;
}

}  // namespace

TEST_CASE("Equal tensors are equal, NaN and infinity among them") {
  for (const Tolerance& tolerance : {Tolerance{}, kExact}) {
    const TensorDifference found = compare_values({1, -2, kNan, kInf, 0}, {1, -2, kNan, kInf, 0}, tolerance);
    CHECK(found.verdict == Verdict::kEqual);
    CHECK(found.max_abs == 0);
    CHECK(found.mean_abs == 0);
    CHECK(found.first_outside.empty());
  }
}

TEST_CASE("The band is atol + rtol times the largest value of B") {
  const Tolerance tolerance{0.5, 0.25, false};
  const TensorDifference found = compare_values({100, 1}, {-8, 1}, tolerance);
  CHECK(found.band == 2.5);
  CHECK(compare_values({8, 3.5}, {8, 1}, tolerance).verdict == Verdict::kInside);
  CHECK(compare_values({8, 3.75}, {8, 1}, tolerance).verdict == Verdict::kOutside);
  CHECK(compare_values({8, -1.75}, {8, 1}, tolerance).verdict == Verdict::kOutside);
}

TEST_CASE("One element outside is found and named by its index") {
  Values values(2 * 3 * 4, 1.0f);
  Values other = values;
  other[7] += 1e-7f;  // inside
  other[17] += 0.5f;
  const FileDifference found = compare({{"x", {2, 3, 4}, values}}, {{"x", {2, 3, 4}, other}});
  const TensorDifference& tensor = found.tensors.at(0);
  CHECK(tensor.verdict == Verdict::kOutside);
  CHECK(tensor.first_outside == Shape{1, 1, 1});
  CHECK(tensor.max_abs == 0.5);
  CHECK(tensor.mean_abs == Approx(0.5 / 24));
  CHECK(tensor.band == Approx(1e-6 + 1e-4 * 1.5));
  CHECK_FALSE(found.inside());
  const FileDifference exact = compare({{"x", {2, 3, 4}, values}}, {{"x", {2, 3, 4}, other}}, kExact);
  CHECK(exact.tensors.at(0).first_outside == Shape{0, 1, 3});
}

TEST_CASE("What is not finite on one side only is outside of any band") {
  const Tolerance wide{1e30, 1, false};
  for (const float value : {kNan, kInf, -kInf}) {
    CHECK(compare_values({1, value}, {1, 2}, wide).first_outside == Shape{1});
    CHECK(compare_values({1, 2}, {1, value}, wide).first_outside == Shape{1});
  }
  CHECK(compare_values({kInf}, {-kInf}, wide).verdict == Verdict::kOutside);
  CHECK(compare_values({kInf}, {kNan}, wide).verdict == Verdict::kOutside);
  CHECK(compare_values({kNan}, {-kNan}, wide).verdict == Verdict::kInside);
  CHECK(std::isinf(compare_values({kNan, 0}, {1, 0}).max_abs));
  CHECK(compare_values({1}, {kInf}).band == 1e-6);  // of finite values only
}

TEST_CASE("Exact means bits") {
  CHECK(compare_values({0.0f}, {-0.0f}).verdict == Verdict::kInside);
  const TensorDifference zero = compare_values({1, 0.0f}, {1, -0.0f}, kExact);
  CHECK(zero.verdict == Verdict::kOutside);
  CHECK(zero.first_outside == Shape{1});
  CHECK(compare_values({kNan}, {-kNan}, kExact).verdict == Verdict::kOutside);
  CHECK(compare_values({1.0f}, {std::nextafter(1.0f, 2.0f)}, kExact).verdict == Verdict::kOutside);
}

TEST_CASE("Token ids must be equal") {
  const TemporaryFolder folder;
  const auto ids = [&](const std::string& file, int32_t id) {
    Hdf5Writer writer(folder / file);
    const std::vector<int32_t> values = {100'000, id};
    writer.write<int32_t>("tokens", Shape{1, 2}, values);
    writer.finish();
    return open_dump(folder / file);
  };
  const Tolerance wide{10, 1, false};
  CHECK(compare_tensors(*ids("a.h5", 7), *ids("b.h5", 7), wide).inside());
  const FileDifference found = compare_tensors(*ids("a.h5", 7), *ids("b.h5", 8), wide);
  CHECK(found.tensors.at(0).first_outside == Shape{0, 1});
}

TEST_CASE("Other shapes, other types and missing names are differences") {
  const FileDifference shapes = compare({{"x", {2, 3}, Values(6)}}, {{"x", {3, 2}, Values(6)}});
  CHECK(shapes.tensors.at(0).mismatch == "shape (2, 3) in A, (3, 2) in B");
  CHECK_FALSE(shapes.inside());

  const FileDifference names = compare({{"x", {1}, {1}}, {"y", {1}, {1}}}, {{"x", {1}, {1}}, {"z", {1}, {1}}});
  CHECK(names.only_a == std::vector<std::string>{"y"});
  CHECK(names.only_b == std::vector<std::string>{"z"});
  CHECK(names_of(names) == std::vector<std::string>{"x"});
  CHECK_FALSE(names.inside());

  const TemporaryFolder folder;
  Hdf5Writer writer(folder / "wide.h5");
  writer.write<double>("x", Shape{1}, std::vector<double>{1});
  writer.write<int32_t>("i", Shape{1}, std::vector<int32_t>{1});
  writer.finish();
  const FileDifference types =
      compare_tensors(*dump_of(folder, "a.h5", {{"x", {1}, {1}}, {"i", {1}, {1}}}), *open_dump(folder / "wide.h5"), {});
  CHECK(types.tensors.at(0).mismatch == "type f32 in A, i32 in B");
  CHECK(types.tensors.at(1).verdict == Verdict::kEqual);  // the same number in fp32 and fp64
  CHECK_FALSE(types.inside());
  require_error(ErrorKind::kConfig, {"no tensor in common"}, [] { compare({{"x", {1}, {1}}}, {{"y", {1}, {1}}}); });
}

// A safetensors file with this header and so many bytes of zeros behind it, opened.
std::unique_ptr<TensorFile> safetensors_of(const TemporaryFolder& folder, const std::string& header, size_t bytes) {
  folder.write("x.safetensors", bytes_of<uint64_t>({header.size()}) + header + std::string(bytes, '\0'));
  return open_safetensors(folder / "x.safetensors");
}

TEST_CASE("A comparison of nothing is a difference") {
  const FileDifference empty = compare({{"x", {0}, {}}}, {{"x", {0}, {}}}, kExact);
  CHECK(empty.tensors.at(0).mismatch == "holds no elements: nothing is compared");
  CHECK_FALSE(empty.inside());
  CHECK_FALSE(
      compare({{"logits", {4, 2, 0}, {}}, {"x", {1}, {1}}}, {{"logits", {4, 2, 0}, {}}, {"x", {1}, {1}}}).inside());
  CHECK_FALSE(FileDifference{}.inside());
  require_error(ErrorKind::kConfig, {"no tensor in common"}, [] { compare({}, {}); });
}

TEST_CASE("Tensors without elements end at once, whatever their dims") {
  const TemporaryFolder folder;
  const auto tokens = safetensors_of(folder,
                                     R"({"tokens":{"dtype":"I64","shape":[0,1000000,33],"data_offsets":[0,0]},)"
                                     R"("traj_loss":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                                     4);
  CHECK_FALSE(compare_tensors(*tokens, *tokens, {}).inside());
  const auto rows =
      safetensors_of(folder, R"({"x":{"dtype":"F32","shape":[4611686018427387904,0],"data_offsets":[0,0]}})", 0);
  CHECK_FALSE(compare_tensors(*rows, *rows, {}).inside());
  require_error(ErrorKind::kData, {"x.safetensors", "x"}, [&] {
    const auto wide =
        safetensors_of(folder, R"({"x":{"dtype":"F32","shape":[4611686018427387904,8,0],"data_offsets":[0,0]}})", 0);
    compare_tensors(*wide, *wide, {});
  });
}

TEST_CASE("The layer of an activation may be any text") {
  const std::vector<Named> tensors = {
      {"hidden.-9223372036854775808", {1}, {1}}, {"hidden.", {1}, {1}}, {"hidden.99999999999999999999", {1}, {1}}};
  CHECK(compare(tensors, tensors).inside());
}

TEST_CASE("A dump beside safetensors: common names only, any number of dims, types by kind") {
  const TemporaryFolder folder;
  Values values(5 * 4 * 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  SafetensorsWriter writer(folder / "b.safetensors",
                           {{"x", DType::kBF16, {5, 4, 3}}, {"v", DType::kF32, {4}}, {"s", DType::kF32, {1}}});
  writer.write_rows("x", 0, 5, values);
  writer.write_rows("v", 0, 4, {values.data(), 4});
  writer.write_rows("s", 0, 1, {values.data(), 1});
  writer.finish();
  const auto b = open_safetensors(folder / "b.safetensors");
  const auto a = dump_of(folder, "a.h5", {{"x", {5, 4, 3}, values}, {"v", {4}, {0, 1, 2, 3}}, {"only", {1}, {1}}});
  const FileDifference found = compare_tensors(*a, *b, kExact);  // small integers are exact in bf16
  CHECK(names_of(found) == std::vector<std::string>{"v", "x"});
  CHECK(found.only_a.empty());
  CHECK(found.inside());
  for (int64_t begin = 0; begin <= 20; ++begin) {
    for (int64_t end = begin; end <= 20; ++end) {
      std::vector<double> rows(static_cast<size_t>((end - begin) * 3));
      b->read_rows("x", {begin, end}, rows);
      CHECK(rows == std::vector<double>(values.begin() + begin * 3, values.begin() + end * 3));
    }
  }
}

TEST_CASE("The tokens of a reference case are shown as those of a dump") {
  const TemporaryFolder folder;
  // tokens (2, 2, 3): two steps of two samples.
  const std::string data = bytes_of<int64_t>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}) + bytes_of<float>({0, 0});
  const std::string header = R"({"tokens":{"dtype":"I64","shape":[2,2,3],"data_offsets":[0,96]},)"
                             R"("traj_loss":{"dtype":"F32","shape":[2],"data_offsets":[96,104]}})";
  folder.write("expected.safetensors", bytes_of<uint64_t>({header.size()}) + header + data);
  const auto expected = open_safetensors(folder / "expected.safetensors");
  CHECK(expected->info("labels").shape == Shape{2, 2});
  const auto dump = [&](const std::string& file, std::vector<int32_t> labels) {
    Hdf5Writer writer(folder / file);
    writer.write<int32_t>("tokens", Shape{2, 2}, std::vector<int32_t>{1, 2, 4, 5});
    writer.write<int32_t>("labels", Shape{2, 2}, labels);
    writer.finish();
    return open_dump(folder / file);
  };
  CHECK(compare_tensors(*dump("a.h5", {2, 3, 5, 6}), *expected, {}).inside());
  const FileDifference found = compare_tensors(*dump("b.h5", {2, 3, 5, 7}), *expected, {});
  CHECK(names_of(found) == std::vector<std::string>{"tokens", "labels"});
  CHECK(found.tensors[0].verdict == Verdict::kEqual);
  CHECK(found.tensors[1].first_outside == Shape{1, 1});
}

TEST_CASE("Layers come in order, with the growth of their mean difference") {
  std::vector<Named> a, b;
  const std::vector<float> differences = {0, 0.5, 0.75, 0, 1, 8, 8, 8, 8, 8, 16};
  for (int i = 10; i >= 0; --i) {
    const std::string name = "hidden." + std::to_string(i);
    a.push_back({name, {1, 1, 2}, {0, 0}});
    b.push_back({name, {1, 1, 2}, {2 * differences[static_cast<size_t>(i)], 0}});
  }
  a.push_back({"grad.w", {1}, {1}});
  b.push_back({"grad.w", {1}, {1}});
  a.push_back({"loss", {1}, {1}});
  b.push_back({"loss", {1}, {1}});
  const FileDifference found = compare(a, b);
  std::vector<std::string> expected = {"loss"};
  for (int i = 0; i <= 10; ++i) expected.push_back("hidden." + std::to_string(i));
  expected.push_back("grad.w");
  CHECK(names_of(found) == expected);
  const auto growth = [&](size_t layer) { return found.tensors.at(layer + 1).growth; };
  CHECK_FALSE(found.tensors[0].growth.has_value());
  CHECK_FALSE(growth(0).has_value());
  CHECK_FALSE(growth(1).has_value());  // of 0
  CHECK(growth(2) == 1.5);
  CHECK(growth(3) == 0.0);
  CHECK_FALSE(growth(4).has_value());
  CHECK(growth(5) == 8.0);
  CHECK(growth(9) == 1.0);
  CHECK(growth(10) == 2.0);
}

TEST_CASE("Positions at which the likeliest token differs, near ties apart from real differences") {
  // Two samples of two positions over four tokens.
  const Values a = {1, 2, 0, 0, /**/ 5, 0, 0, 4, /**/ 1, 3, 2, 0, /**/ 2, 2.5f, 0, 0};
  const Values b = {1, 2, 0, 0, /**/ 4, 0, 0, 5.5f, /**/ 1, 3, 2, 0, /**/ 2.5f, 2.25f, 0, 0};
  const auto run = [&](double atol) {
    const FileDifference found = compare({{"logits", {2, 2, 4}, a}}, {{"logits", {2, 2, 4}, b}}, {atol, 0, false});
    REQUIRE(found.logits.has_value());
    return *found.logits;
  };
  const LogitsDifference found = run(0.25);
  CHECK(found.positions == 4);
  REQUIRE(found.flips.size() == 2);
  CHECK(found.flips[0].position == Shape{0, 1});
  CHECK(found.flips[0].token_a == 0);
  CHECK(found.flips[0].token_b == 3);
  CHECK(found.flips[0].gap_a == 1);
  CHECK(found.flips[0].gap_b == 1.5);
  CHECK(found.flips[0].max_abs == 1.5);
  CHECK_FALSE(found.flips[0].near_tie);  // 1.5 is more than twice the band
  CHECK(found.flips[1].position == Shape{1, 1});
  CHECK(found.flips[1].token_a == 1);
  CHECK(found.flips[1].token_b == 0);
  CHECK(found.flips[1].gap_a == 0.5);
  CHECK(found.flips[1].near_tie);
  CHECK(found.min_gap_a == 0.5);
  CHECK(found.median_gap_a == 1);
  CHECK(found.min_gap_b == 0.25);
  CHECK(found.median_gap_b == 1);
  CHECK(run(0.75).flips[0].near_tie);
  CHECK_FALSE(run(0.2).flips[1].near_tie);
}

TEST_CASE("A tensor that the band swallows whole is told") {
  const FileDifference swallowed = compare({{"x", {1}, {1e-7f}}}, {{"x", {1}, {5e-7f}}});
  CHECK(swallowed.tensors.at(0).is_vacuous());
  CHECK_FALSE(swallowed.inside());  // nothing else says anything
  CHECK(compare({{"x", {1}, {1e-7f}}, {"y", {1}, {1}}}, {{"x", {1}, {5e-7f}}, {"y", {1}, {1}}}).inside());
  CHECK_FALSE(compare_values({5e-7f}, {5e-7f}).is_vacuous());  // equal bits need no band
  CHECK_FALSE(compare_values({1.00001f}, {1.0f}).is_vacuous());
  const auto lines = describe(compare({{"x", {1}, {1e-7f}}}, {{"x", {1}, {5e-7f}}}), false);
  CHECK(std::count(lines.begin(), lines.end(), "1 tensors hold nothing above their band: lower --atol to judge them") ==
        1);
}

TEST_CASE("Of gradients the worst ten and all that are outside are listed") {
  std::vector<Named> a, b;
  for (int i = 0; i < 30; ++i) {
    const std::string name = "grad.w" + std::to_string(i);
    a.push_back({name, {1}, {1}});
    b.push_back({name, {1}, {1 + 1e-6f * static_cast<float>(i)}});
  }
  a.push_back({"hidden.0", {1}, {1}});
  b.push_back({"hidden.0", {1}, {1}});
  FileDifference found = compare(a, b);
  const auto lines = describe(found, false);
  CHECK(lines_with(lines, "grad.w") == 10);
  CHECK(lines_with(lines, "grad.w29") == 1);
  CHECK(lines_with(lines, "grad.w20 ") == 1);
  CHECK(lines_with(lines, "hidden.0") == 1);
  CHECK(lines_with(lines, "… and 20 more within their bands") == 1);
  CHECK(lines_with(describe(found, true), "grad.w") == 30);
  CHECK(lines_with(describe(found, true), "more within") == 0);
  for (size_t i = 0; i < 15; ++i) b[i].values[0] = 2;
  found = compare(a, b);
  CHECK(lines_with(describe(found, false), "OUTSIDE") == 15);
  CHECK(lines_with(describe(found, false), "… and 15 more within their bands") == 1);
}

TEST_CASE("Weights of a multimodal release beside those of the text model alone") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& file, DType dtype, const std::vector<std::string>& names) {
    std::vector<SafetensorsSpec> specs;
    for (const std::string& name : names) specs.push_back({name, dtype, {2}});
    SafetensorsWriter writer(folder / file, specs);
    for (const std::string& name : names) writer.write_rows(name, 0, 2, Values{1, 2});
    writer.finish();
    return open_safetensors(folder / file);
  };
  folder.write("config.json", R"({"model_type":"gemma4","vision_config":{},"audio_config":{}})");
  const auto released = write("a.safetensors", DType::kBF16,
                              {"model.language_model.norm.weight", "model.vision_tower.x", "model.embed_audio.y"});
  const auto exported = write("b.safetensors", DType::kF32, {"model.norm.weight"});
  const FileDifference found = compare_tensors(*released, *exported, kExact);
  CHECK(names_of(found) == std::vector<std::string>{"model.norm.weight"});
  CHECK(found.inside());
  CHECK(lines_with(describe(found, false), "left out of A: 1 tensors of audio and 1 tensors of vision") == 1);
  CHECK(lines_with(describe(found, false), "left out") == 1);
  const auto more = write("c.safetensors", DType::kF32, {"model.norm.weight", "model.smell_tower.z"});
  CHECK(compare_tensors(*released, *more, kExact).only_b == std::vector<std::string>{"model.smell_tower.z"});
}
