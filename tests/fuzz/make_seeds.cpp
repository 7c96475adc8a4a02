// Writes the inputs that fuzzing begins with: make_seeds FOLDER, a folder per target. They are small ones that invar
// accepts, and those of faults that were found and mended, whose names begin with "found-".
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>

#include "checkpoint/hdf5_file.h"
#include "checkpoint/hdf5_library.h"
#include "checkpoint/index_table.h"
#include "checkpoint/safetensors.h"
#include "config/contract.h"
#include "config/key_table.h"
#include "config/yaml_loader.h"
#include "data/order_cache.h"
#include "support/bytes.h"
#include "unit/data/data_files.h"

using namespace invar;
using namespace invar::test;

namespace fs = std::filesystem;

namespace {

const fs::path kSource = INVAR_SOURCE_DIR;
using Seeds = std::map<std::string, std::string>;  // by name

std::string bytes_at(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

Seeds yaml_configs() {
  Seeds seeds;
  for (const auto& entry : fs::directory_iterator(kSource / "configs")) {
    if (entry.path().extension() == ".yaml") seeds[entry.path().stem()] = bytes_at(entry.path());
  }
  const std::string small =
      "model: {vocab_size: 257, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: "
      "4,\n"
      "  num_key_value_heads: 2, head_dim: 16}\ntrain: {steps: 3, sequence_length: 32}\n";
  seeds["small"] = small;
  seeds["resolved"] = to_yaml(load_config_text(small, "small"));
  seeds["overrides"] = small + '\0' + "train.steps=5\nparallel.nonuniform.failed=[dp0.tp1, node3.gpu2]\ndevice=cpu";
  seeds["map"] = small + '\0' + "parallel.nonuniform.non_active_ranks_per_dp={0: [2, 5], 1: []}";
  seeds["anchors"] = "train: &t {steps: &n 3, sequence_length: *n}\nlog: {dir: \"a b\\n\\x01\", every: 1}\n---\n";
  seeds["failed"] = small + "parallel:\n  tensor: 2\n  data: 2\n  nonuniform:\n    failed:\n    - dp0.tp1\n";
  return seeds;
}

std::string repeated(std::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

// A sound file of an object, in which a number became something else. With these the stack overflowed, an exception of
// the parser escaped, a wrong value got through, or memory ran out.
Seeds found_in_json(const std::string& sound, const std::string& key) {
  const size_t at = sound.find(format("\"{}\"", key));
  const size_t value = sound.find(':', at) + 1, end = sound.find_first_of(",}", at);
  const auto with = [&](const std::string& other) { return std::string(sound).replace(value, end - value, other); };
  return {{"found-nested-lists", with(repeated("[", 100'000))},
          {"found-nested-objects", with(repeated("{\"a\":", 20'000))},
          {"found-no-double", with("1e400")},
          {"found-no-machine-has", with("4611686018427387904")},
          {"found-twice", with(format("1,\"{}\":2", key))},
          {"found-control-characters", with("\"\\u001b[2J\\n\"")}};
}

Seeds of_cases(const std::string& file, const std::string& key) {
  Seeds seeds = found_in_json(bytes_at(kSource / "tests/reference/qwen3_batch16" / file), key);
  for (const auto& entry : fs::directory_iterator(kSource / "tests/reference")) {
    if (entry.is_directory()) seeds[entry.path().filename()] = bytes_at(entry.path() / file);
  }
  return seeds;
}

Seeds texts() {
  NumericsContract contract;
  contract.arithmetic = "fma-chain";
  contract.leaves = contract.workers = 8;
  NumericsContract other = contract;
  other.workers = 4;
  return {{"blend", std::string(1, '\0') + "0.7 data/a 0.3 ./1"},
          {"paths", std::string(1, '\0') + "a b c"},
          {"split",
           "\1"
           "969, 30, 1"},
          {"part",
           "\1"
           "1"},
          {"contract", "\2" + contract.text() + '\0' + other.text()}};
}

std::string safetensors_of(const std::string& header, size_t bytes) {
  return bytes_of<uint64_t>({header.size()}) + header + std::string(bytes, '\1');
}

// A tensor without bytes.
std::string shaped(const std::string& shape) {
  return safetensors_of(R"({"x":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,0]}})", 0);
}

Seeds safetensors(const fs::path& scratch) {
  SafetensorsWriter writer(scratch / "x", {{"a.weight", DType::kF32, {3, 2}}, {"b", DType::kBF16, {5}}});
  writer.write_rows("a.weight", 0, 3, std::array<float, 6>{1, 2, 3, 4, 5, 6});
  writer.write_rows("b", 0, 5, std::array<float, 5>{1, 2, 3, 4, 5});
  writer.finish();
  return {{"written", bytes_at(scratch / "x")},
          {"integers", safetensors_of(R"({"i":{"dtype":"I64","shape":[2,1],"data_offsets":[0,16]},)"
                                      R"("h":{"dtype":"F16","shape":[],"data_offsets":[16,18]}})",
                                      18)},
          {"case", safetensors_of(R"({"tokens":{"dtype":"I64","shape":[1,2,3],"data_offsets":[0,48]},)"
                                  R"("traj_loss":{"dtype":"F32","shape":[1],"data_offsets":[48,52]}})",
                                  52)},
          {"found-nested-shape", shaped(std::string(100'000, '['))},
          {"found-shape-of-2^64", shaped("[4294967296,4294967296]")},
          {"found-rows-without-columns", shaped("[4611686018427387904,0]")},
          {"found-no-row-of-2^62", shaped("[0,4611686018427387904]")},
          {"found-negative-shape", shaped("[-1,-1]")},
          {"found-shape-no-double", shaped("[1e400]")},
          {"found-long-header", bytes_of<uint64_t>({~uint64_t{0}}) + "{}"}};
}

// The file, whose attribute `step` is 64 numbers: they were written over the stack.
std::string with_array_as_attribute(const fs::path& path) {
  const std::vector<int64_t> many(64, -1);
  const hsize_t count = many.size();
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  const hid_t space = H5Screate_simple(1, &count, nullptr);
  H5Adelete(file, "step");
  const hid_t attribute = H5Acreate2(file, "step", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
  H5Awrite(attribute, H5T_NATIVE_INT64, many.data());
  H5Aclose(attribute);
  H5Sclose(space);
  H5Fclose(file);
  return bytes_at(path);
}

Seeds hdf5_dumps(const fs::path& scratch) {
  Hdf5Writer writer(scratch / "x.h5");
  writer.write<float>("hidden.0", std::array<int64_t, 3>{1, 2, 2}, std::array<float, 4>{1, 2, 3, 4});
  writer.write<int32_t>("tokens", std::array<int64_t, 2>{1, 2}, std::array<int32_t, 2>{5, 6});
  writer.set_attribute("step", int64_t{7});
  writer.set_attribute("config", std::string("train: {steps: 7}"));
  writer.finish();
  const std::string sound = bytes_at(scratch / "x.h5");
  Seeds seeds = {{"dump", sound}, {"found-array-as-attribute", with_array_as_attribute(scratch / "x.h5")}};
  for (const size_t at : {96, 128, 136}) {  // the root's description: the library followed such addresses
    seeds[format("found-eight-bytes-at-{}", at)] = std::string(sound).replace(at, 8, 8, '\xff');
  }
  for (size_t at = 96; at + 8 <= sound.size(); at += 8) {  // the root's tree, or one below it, leads to the root
    uint64_t address = 0;
    std::memcpy(&address, sound.data() + at, sizeof address);
    if (address <= 96 || address >= sound.size()) continue;
    seeds[format("found-back-to-the-root-{}", at)] = std::string(sound).replace(at, 8, bytes_of<uint64_t>({96}));
  }
  for (const std::array<int64_t, 2> shape : {std::array<int64_t, 2>{0, 4}, {4, 0}}) {
    Hdf5Writer empty(scratch / "x.h5");
    empty.write<float>("logits", shape, std::span<const float>());
    empty.finish();
    seeds[format("found-shape-{}-{}", shape[0], shape[1])] = bytes_at(scratch / "x.h5");
  }
  return seeds;
}

StateTensor state_tensor(const std::string& name, std::vector<int64_t> shape) {
  StateTensor tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  return tensor;
}

// Without the sum, which the target adds.
Seeds checkpoint_tables() {
  CheckpointIndex index;
  index.info = {7, 28, 280, 1, true, "train: {steps: 9}\n", "tensor 2 x data 1", "leaves 8\n", "0123456789abcdef"};
  index.hdf5_bytes = 1000;
  index.tensors = {state_tensor("model/a", {6, 4}), state_tensor("model/b", {5})};
  index.files = {{0, 2000, 1}, {1, 3000, 2}};
  index.pieces = {{0, 0, {{0, 2}, {0, 4}}, {1, 4}, 800, {1, 2}},
                  {0, 1, {{2, 6}, {0, 4}}, {4, 4}, 800, {3}},
                  {1, 1, {{0, 5}, {0, 1}}, {5, 1}, 2980, {10}}};
  const auto bytes_with = [&](const std::function<void(CheckpointIndex&)>& change) {
    CheckpointIndex changed = index;
    change(changed);
    const std::vector<std::byte> bytes = encode_index(changed);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size() - sizeof(uint32_t));
  };
  const auto rows = [](int64_t begin, int64_t end) {
    return [=](CheckpointIndex& i) { i.pieces[0].rectangle.rows = {begin, end}; };
  };
  const std::string sound = bytes_with([](auto&) {});
  std::string many_sums = sound;  // the last number but one counts the checksums of the last piece
  many_sums.replace(sound.size() - 12, 8, bytes_of<int64_t>({int64_t{1} << 60}));
  return {{"index", sound},
          {"found-tensor-2^40", bytes_with([](auto& i) { i.pieces[0].tensor = size_t{1} << 40; })},
          {"found-tiles-of-no-rows", bytes_with([](auto& i) { i.pieces[0].tiling.rows = 0; })},
          {"found-tiles-of-no-columns", bytes_with([](auto& i) { i.pieces[0].tiling.cols = 0; })},
          {"found-negative-tiles", bytes_with([](auto& i) { i.pieces[0].tiling.cols = -4; })},
          {"found-negative-rows", bytes_with(rows(-2, 2))},
          {"found-rows-backwards", bytes_with(rows(2, INT64_MIN))},
          {"found-rows-beyond", bytes_with(rows(0, INT64_MAX))},
          {"found-offset-beyond", bytes_with([](auto& i) { i.pieces[0].offset = INT64_MAX; })},
          {"found-shape-of-2^64", bytes_with([](auto& i) {
             i.tensors[0].shape = {int64_t{1} << 32, int64_t{1} << 32};
           })},
          {"found-2^60-checksums", many_sums}};
}

Seeds flat_tokens() {
  const std::string tokens = bytes_of(std::vector<uint16_t>(40, 7));
  std::vector<int32_t> header(256);
  header[0] = 20240520, header[1] = 1, header[2] = 40;
  const std::string headed = bytes_of(header) + tokens;
  header[0] = 20240801, header[1] = 7, header[2] = 20;
  return {{"uint16", "\1" + tokens},
          {"uint32", "\2" + bytes_of(std::vector<uint32_t>(20, 7))},
          {"llmc", std::string(1, '\3') + headed},
          {"llmc32", std::string(1, '\0') + bytes_of(header) + bytes_of(std::vector<uint32_t>(20, 7))}};
}

Seeds megatron_indices() {
  IndexBytes documents = IndexBytes::of({5, 3, 7, 2, 9}, 8, 2);
  documents.documents = {0, 2, 5};
  return {{"sequences", IndexBytes::of({5, 3, 7, 2, 9}, 8, 2).bytes()},
          {"documents", documents.bytes()},
          {"wide", IndexBytes::of({5, 3}, 4, 4).bytes()}};
}

Seeds kept_orders(const fs::path& scratch) {
  const StoredArray<int32_t> lengths(std::vector<int32_t>{5, 3, 7, 2, 9});
  keep_order((scratch / "orders").string(), "corpus", plan_order(lengths, 4, 9, 1234), lengths);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(scratch / "orders")) files.push_back(entry.path());
  std::ranges::sort(files);
  Seeds seeds;
  for (size_t i = 0; i < files.size(); ++i) {
    seeds[format("file{}", i)] = std::string(1, static_cast<char>(i)) + bytes_at(files[i]);
  }
  return seeds;
}

Seeds run_lines() {
  const std::string hash = R"({"weights":"0123456789abcdef","exp_avg":"0123456789abcdef"})";
  return {{"lines", "{\"step\":1,\"tokens\":64,\"loss\":5.5,\"grad_norm\":null,\"lr\":1e-3,\"state_hash\":" + hash +
                        "}\n" + "{\"step\":2,\"loss\":4.5}\n{\"step\":2,\"validation_loss\":4}\n{\"step\":3,\"lo"}};
}

void write(const fs::path& folder, const Seeds& seeds) {
  fs::create_directories(folder);
  for (const auto& [name, bytes] : seeds) std::ofstream(folder / name, std::ios::binary) << bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const fs::path folder = argv[1];
  const TemporaryFolder scratch;
  const Seeds tensors = safetensors(scratch.path());
  write(folder / "yaml_config", yaml_configs());
  write(folder / "hf_config", of_cases("config.json", "num_hidden_layers"));
  write(folder / "reference_case", of_cases("case.json", "batch"));
  write(folder / "texts", texts());
  write(folder / "safetensors", tensors);
  write(folder / "tensor_files", tensors);
  write(folder / "safetensors_index",
        {{"index", R"({"metadata":{"total_size":24},"weight_map":{"a":"1.safetensors","b":"1.safetensors",)"
                   R"("c":"2.safetensors","d":"2.safetensors"}})"}});
  write(folder / "hdf5_dump", hdf5_dumps(scratch.path()));
  write(folder / "checkpoint_table", checkpoint_tables());
  write(folder / "flat_tokens", flat_tokens());
  write(folder / "megatron_index", megatron_indices());
  write(folder / "order_cache", kept_orders(scratch.path()));
  write(folder / "run_lines", run_lines());
  return 0;
}
