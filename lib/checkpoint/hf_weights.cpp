#include "checkpoint/hf_weights.h"

#include <algorithm>
#include <set>

#include "checkpoint/hf_names.h"
#include "parallel/logical_tensor.h"

namespace invar {
namespace {

bool is_multimodal(const SafetensorsReader& reader) {
  const std::vector<std::string> names = reader.names();
  return std::any_of(names.begin(), names.end(), [](const auto& name) { return text_model_name(name) != name; });
}

void check_shape(const SafetensorsReader& reader, const Parameter& parameter) {
  const SafetensorsInfo& info = reader.info(name_in_file(reader, parameter.name));
  if (info.shape == parameter.shape) return;
  throw Error(ErrorKind::kData,
              format("{}: tensor '{}' has shape {}, the model needs {}", info.file, parameter.name,
                     describe_shape(info.shape), describe_shape(parameter.shape)),
              "the model section does not describe these weights; set model.hf_path to their folder");
}

bool equal_tensors(const SafetensorsReader& reader, const std::string& a, const std::string& b) {
  const SafetensorsInfo& info = reader.info(a);
  if (info.shape != reader.info(b).shape) return false;
  std::vector<float> row_a(static_cast<size_t>(info.cols()));
  std::vector<float> row_b(row_a.size());
  for (int64_t row = 0; row < info.rows(); ++row) {
    reader.read_rows(a, {row, row + 1}, {0, info.cols()}, row_a);
    reader.read_rows(b, {row, row + 1}, {0, info.cols()}, row_b);
    if (row_a != row_b) return false;
  }
  return true;
}

void refuse_unknown(const SafetensorsReader& reader, const std::set<std::string>& known,
                    const std::set<std::string>& unused) {
  const std::string head = "lm_head.weight";
  const std::string embedding = "model.embed_tokens.weight";
  const bool multimodal = is_multimodal(reader);
  for (const std::string& name : reader.names()) {
    const std::string mine = text_model_name(name);
    if (mine != name && reader.contains(mine)) {
      throw Error(ErrorKind::kData, format("{}: holds '{}' and '{}'", reader.info(name).file, mine, name),
                  "the folder mixes two forms of the model; download it again");
    }
    if (known.contains(mine) || unused.contains(mine)) continue;
    if (multimodal && is_other_modality(name)) continue;
    if (name == head && known.contains(embedding)) {
      if (equal_tensors(reader, head, name_in_file(reader, embedding))) continue;
      throw Error(
          ErrorKind::kData,
          format("{}: '{}' differs from '{}', but the model ties them", reader.info(name).file, head, embedding),
          "set model.tie_word_embeddings: false");
    }
    throw Error(ErrorKind::kData, format("{}: the model has no parameter '{}'", reader.info(name).file, name),
                "the model section does not describe these weights; set model.hf_path to their folder");
  }
}

}  // namespace

std::string name_in_file(const SafetensorsReader& reader, const std::string& name) {
  const std::string multimodal = multimodal_name(name);
  return !reader.contains(name) && reader.contains(multimodal) ? multimodal : name;
}

std::vector<float> read_run(const SafetensorsReader& reader, const std::string& name, const Parameter& parameter,
                            const RowRun& run) {
  const int64_t rows = run.global.size();
  const int64_t cols = parameter.cols();
  std::vector<float> stored(static_cast<size_t>(rows * cols));
  if (!parameter.transposed) {
    reader.read_rows(name, run.global, {0, cols}, stored);
    return stored;
  }
  const int64_t block = parameter.column_block;
  std::vector<float> logical(stored.size());
  reader.read_rows(name, {0, parameter.shape[0]}, {run.global.begin * block, run.global.end * block}, logical);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t from = (col / block * rows + row) * block + col % block;
      stored[static_cast<size_t>(row * cols + col)] = logical[static_cast<size_t>(from)];
    }
  }
  return stored;
}

void load_hf_weights(const ParameterTable& table, const Stream& stream, const SafetensorsReader& reader) {
  std::set<std::string> known;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      known.insert(parameter.name);
      check_shape(reader, parameter);
    }
  }
  refuse_unknown(reader, known, table.unused());
  if (table.flat_values().is_meta()) return;
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun& run, Range elements) {
    const std::vector<float> values = read_run(reader, name_in_file(reader, parameter.name), parameter, run);
    write_f32(stream, values, table.flat_values(), elements);
  });
}

void export_hf_weights(const ParameterTable& table, const ProcessGroups& groups, const Stream& stream,
                       const std::filesystem::path& folder, int64_t max_shard_bytes) {
  if (groups.data_rank() != 0) return;
  const bool writes = groups.tensor->rank() == 0;
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, std::pair<const Weight*, const Parameter*>> sources;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      specs.push_back({parameter.name, table.flat_values().dtype(), parameter.shape});
      sources[parameter.name] = {&weight, &parameter};
    }
  }
  const std::vector<HfShard> shards = plan_hf_shards(specs, max_shard_bytes);
  if (writes) std::filesystem::create_directories(folder);
  for (const HfShard& shard : shards) {
    std::unique_ptr<SafetensorsWriter> writer;
    if (writes) writer = std::make_unique<SafetensorsWriter>(folder / shard.file, shard.tensors);
    for (const SafetensorsSpec& spec : shard.tensors) {
      const auto& [weight, parameter] = sources.at(spec.name);
      const std::vector<float> logical =
          collect_logical(*groups.tensor, stream, table.flat_values(), *weight, *parameter);
      if (writes) writer->write_rows(spec.name, 0, spec.shape[0], logical);
    }
    if (writes) writer->finish();
  }
  if (writes) write_hf_index(folder, shards);
}

}  // namespace invar
