// Writes the inputs that fuzzing begins with, small ones that invar accepts: make_seeds FOLDER, a folder per target.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "checkpoint/hdf5_file.h"
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

Seeds of_cases(const std::string& file) {
  Seeds seeds;
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
                                  52)}};
}

Seeds hdf5_dumps(const fs::path& scratch) {
  Hdf5Writer writer(scratch / "x.h5");
  writer.write<float>("hidden.0", std::array<int64_t, 3>{1, 2, 2}, std::array<float, 4>{1, 2, 3, 4});
  writer.write<int32_t>("tokens", std::array<int64_t, 2>{1, 2}, std::array<int32_t, 2>{5, 6});
  writer.set_attribute("step", int64_t{7});
  writer.set_attribute("config", std::string("train: {steps: 7}"));
  writer.finish();
  return {{"dump", bytes_at(scratch / "x.h5")}};
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
  const std::vector<std::byte> bytes = encode_index(index);
  return {{"index", {reinterpret_cast<const char*>(bytes.data()), bytes.size() - sizeof(uint32_t)}}};
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
  write(folder / "hf_config", of_cases("config.json"));
  write(folder / "reference_case", of_cases("case.json"));
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
