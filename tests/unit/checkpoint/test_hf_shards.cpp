#include "checkpoint/safetensors.h"
#include "safetensors_files.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

std::vector<std::vector<std::string>> tensor_names(const std::vector<HfShard>& shards) {
  std::vector<std::vector<std::string>> result;
  for (const auto& shard : shards) {
    result.emplace_back();
    for (const auto& tensor : shard.tensors) result.back().push_back(tensor.name);
  }
  return result;
}

// Three tensors in two shards; tensor number i is filled with i.
std::vector<HfShard> write_model(const std::filesystem::path& folder) {
  const auto shards =
      plan_hf_shards({{"a", DType::kF32, {2, 2}}, {"b", DType::kBF16, {4}}, {"c", DType::kF32, {3}}}, 24);
  float fill = 1;
  for (const auto& shard : shards) {
    SafetensorsWriter writer(folder / shard.file, shard.tensors);
    for (const auto& tensor : shard.tensors) {
      const SafetensorsInfo view{"", tensor.shape, ""};
      writer.write_rows(tensor.name, 0, view.rows(),
                        std::vector<float>(static_cast<size_t>(view.rows() * view.cols()), fill++));
    }
    writer.finish();
  }
  write_hf_index(folder, shards);
  return shards;
}

constexpr const char* kIndex = "model.safetensors.index.json";

}  // namespace

TEST_CASE("An export replaces its owner's earlier one, and nobody else's") {
  const TemporaryFolder folder;
  const std::filesystem::path hf = folder / "hf";
  prepare_hf_folder(hf, "key", "run a");
  claim_hf_folder(hf, "key", "run a");
  write_file(hf / "model-00001-of-00002.safetensors", "old");
  write_file(hf / "model.safetensors.index.json", "old");
  write_file(hf / "tokenizer.json", "the user's");
  write_file(hf / "adapter_model.safetensors", "the user's");
  require_error(ErrorKind::kConfig, {"key = ", "safetensors already"}, [&] { prepare_hf_folder(hf, "key", "run b"); });
  require_error(ErrorKind::kConfig, {"safetensors already"}, [&] { prepare_hf_folder(hf, "key"); });
  prepare_hf_folder(hf, "key", "run a");
  CHECK(std::filesystem::exists(hf / "model-00001-of-00002.safetensors"));  // until the new one is about to come
  claim_hf_folder(hf, "key", "run a");
  CHECK(!std::filesystem::exists(hf / "model-00001-of-00002.safetensors"));
  CHECK(!std::filesystem::exists(hf / "model.safetensors.index.json"));
  CHECK(std::filesystem::exists(hf / "tokenizer.json"));
  CHECK(std::filesystem::exists(hf / "adapter_model.safetensors"));
  require_error(ErrorKind::kConfig, {"holds adapter_model"}, [&] { claim_hf_folder(hf, "key", "run b"); });
}

TEST_CASE("Tensors are cut into shards in their order") {
  const SafetensorsSpec small1{"s1", DType::kF32, {2}}, small2{"s2", DType::kBF16, {4}};  // 8 bytes each
  const SafetensorsSpec large{"large", DType::kF32, {100}}, small3{"s3", DType::kF32, {1, 2}};
  const std::vector<SafetensorsSpec> tensors{small1, small2, large, small3};
  using Names = std::vector<std::vector<std::string>>;

  CHECK(tensor_names(plan_hf_shards(tensors, 424)) == Names{{"s1", "s2", "large", "s3"}});
  CHECK(tensor_names(plan_hf_shards(tensors, 423)) == Names{{"s1", "s2", "large"}, {"s3"}});
  CHECK(tensor_names(plan_hf_shards(tensors, 16)) == Names{{"s1", "s2"}, {"large"}, {"s3"}});
  CHECK(tensor_names(plan_hf_shards(tensors, 1)) == Names{{"s1"}, {"s2"}, {"large"}, {"s3"}});

  CHECK(tensor_names(plan_hf_shards({large, small1, small2, small3}, 16)) == Names{{"large"}, {"s1", "s2"}, {"s3"}});

  CHECK(plan_hf_shards(tensors, 424)[0].file == "model.safetensors");
  CHECK(plan_hf_shards(tensors, 423)[0].file == "model-00001-of-00002.safetensors");
  CHECK(plan_hf_shards(tensors, 423)[1].file == "model-00002-of-00002.safetensors");
  require_error(ErrorKind::kFault, {"shards of 0 bytes"}, [&] { (void)plan_hf_shards(tensors, 0); });
}

TEST_CASE("A sharded model is written with its index and read as one") {
  const TemporaryFolder folder;
  const auto shards = write_model(folder.path());
  REQUIRE(shards.size() == 2);
  CHECK(read_file(folder / kIndex) == R"({
  "metadata": {
    "total_size": 36
  },
  "weight_map": {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors"
  }
}
)");
  const SafetensorsReader reader(folder.path());
  CHECK(reader.names() == std::vector<std::string>{"a", "b", "c"});
  CHECK(reader.info("c").file == (folder / "model-00002-of-00002.safetensors").string());
  std::vector<float> c(3), b(4);
  reader.read_rows("c", {0, 3}, {0, 1}, c);
  reader.read_rows("b", {0, 4}, {0, 1}, b);
  CHECK(c == std::vector<float>(3, 3));
  CHECK(b == std::vector<float>(4, 2));
}

TEST_CASE("One shard needs no index; an index is not written over what would hide it") {
  const TemporaryFolder folder;
  const auto single = plan_hf_shards({{"a", DType::kF32, {1}}}, 100);
  write_hf_index(folder.path(), single);
  CHECK(std::filesystem::is_empty(folder.path()));

  const auto several = plan_hf_shards({{"a", DType::kF32, {1}}, {"b", DType::kF32, {1}}}, 4);
  require_error(ErrorKind::kFault, {"shard model-00001-of-00002.safetensors was not written"},
                [&] { write_hf_index(folder.path(), several); });
  write_file(folder / "model.safetensors", "older");
  require_error(ErrorKind::kData, {"would be loaded instead"}, [&] { write_hf_index(folder.path(), several); });
  CHECK_FALSE(std::filesystem::exists(folder / kIndex));
}

TEST_CASE("An index that does not fit its shards is refused") {
  const TemporaryFolder folder;
  write_model(folder.path());
  const auto refused = [&](const std::string& index, std::vector<std::string> parts) {
    write_file(folder / kIndex, index);
    parts.push_back(kIndex);
    require_error(ErrorKind::kData, parts, [&] { SafetensorsReader reader(folder.path()); });
  };
  refused("{", {"not valid JSON"});
  refused("{}", {"missing weight_map"});
  refused(R"({"weight_map":[]})", {"weight_map must be an object, not []"});
  refused(R"({"weight_map":{"a":1}})", {"weight_map.a must be a string, not 1"});
  refused(R"({"weight_map":{"a":"../model-00001-of-00002.safetensors"}})", {"'a'", "not a plain file name"});
  refused(R"({"weight_map":{"a":".."}})", {"'a'", "not a plain file name"});
  refused(R"({"weight_map":{"a":"model-00003-of-00003.safetensors"}})",
          {"shard 'model-00003-of-00003.safetensors', which holds tensor 'a', is missing"});
  refused(R"({"weight_map":{"c":"model-00001-of-00002.safetensors"}})",
          {"'c'", "should be in shard 'model-00001-of-00002.safetensors' but is not"});
  refused(R"({"weight_map":{"a":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}})",
          {"weight_map.a is given twice"});
  // A key of "metadata" is no tensor name.
  write_file(folder / kIndex, R"({"metadata":{"a":1},"weight_map":{"a":"model-00001-of-00002.safetensors"}})");
  CHECK(SafetensorsReader(folder.path()).names() == std::vector<std::string>{"a"});
}

namespace {

// The tensors of write_model() as model.safetensors beside its shards; `b` has this value and dtype.
void write_single(const std::filesystem::path& folder, float b = 2, DType dtype = DType::kBF16, bool has_c = true) {
  std::vector<SafetensorsSpec> specs{{"a", DType::kF32, {2, 2}}, {"b", dtype, {4}}};
  if (has_c) specs.push_back({"c", DType::kF32, {3}});
  SafetensorsWriter writer(folder / "model.safetensors", specs);
  writer.write_rows("a", 0, 2, std::vector<float>(4, 1));
  writer.write_rows("b", 0, 4, std::vector<float>{2, 2, 2, b});
  if (has_c) writer.write_rows("c", 0, 3, std::vector<float>(3, 3));
  writer.finish();
}

}  // namespace

TEST_CASE("A model.safetensors beside an index and its shards is taken where both are equal, else refused") {
  const TemporaryFolder folder;
  write_model(folder.path());
  std::vector<float> b(4);
  write_single(folder.path());
  {
    const SafetensorsReader reader(folder.path());
    reader.read_rows("b", {0, 4}, {0, 1}, b);
    CHECK(b == std::vector<float>(4, 2));
    CHECK(reader.info("b").file == (folder / "model.safetensors").string());
  }
  write_single(folder.path(), 2.5f);
  {
    const SafetensorsReader reader(folder.path());
    reader.read_rows("b", {0, 3}, {0, 1}, std::span(b).first(3));
    require_error(ErrorKind::kData,
                  {"/model.safetensors: tensor 'b': has other values in ", "/model-00001-of-00002.safetensors"},
                  {"keep one of the two"}, [&] {
                    reader.read_rows("b", {0, 4}, {0, 1}, b);
                  });
  }
  const auto refused = [&](const std::string& how) {
    require_error(ErrorKind::kData,
                  {"model.safetensors and the shards of model.safetensors.index.json are two sets of weights: " + how},
                  {"keep one of the two"}, [&] { SafetensorsReader reader(folder.path()); });
  };
  write_single(folder.path(), 2, DType::kF32);
  refused("tensor 'b' is F32 (4) in one and BF16 (4) in the other");
  write_single(folder.path(), 2, DType::kBF16, false);
  refused("tensor 'c' is only in model-00002-of-00002.safetensors");
  const std::string index = read_file(folder / kIndex);
  write_file(folder / kIndex, R"({"weight_map":{"a":"model-00001-of-00002.safetensors"}})");
  refused("tensor 'b' is only in model.safetensors");
  // Half of the shards are no set of weights, and an index without any is left over.
  write_file(folder / kIndex, index);
  std::filesystem::remove(folder / "model-00001-of-00002.safetensors");
  require_error(ErrorKind::kData, {"shard 'model-00001-of-00002.safetensors', which holds tensor 'a', is missing"},
                [&] { SafetensorsReader reader(folder.path()); });
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");
  CHECK(SafetensorsReader(folder.path()).names() == std::vector<std::string>{"a", "b"});
  // An index may name model.safetensors itself.
  write_file(folder / kIndex, R"({"weight_map":{"a":"model.safetensors"}})");
  CHECK(SafetensorsReader(folder.path()).names() == std::vector<std::string>{"a", "b"});
}

TEST_CASE("A damaged shard is named") {
  const TemporaryFolder folder;
  write_model(folder.path());
  write_file(folder / "model-00002-of-00002.safetensors", "abc");
  require_error(ErrorKind::kData, {"model-00002-of-00002.safetensors", "too short"},
                [&] { SafetensorsReader reader(folder.path()); });
}
