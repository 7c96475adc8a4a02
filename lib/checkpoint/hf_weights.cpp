#include "checkpoint/hf_weights.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/presence.h"
#include "core/shown.h"
#include "parallel/logical_tensor.h"

namespace invar {
namespace {

constexpr std::string_view kText = "model.";
constexpr std::string_view kMultimodalText = "model.language_model.";
constexpr const char* kOtherModel =
    "the model section does not describe these weights; set model.hf_path to their folder";

void check_shape(const HfWeights& weights, const Parameter& parameter) {
  const SafetensorsInfo& info = weights.files().info(weights.name_in_file(parameter.name));
  if (info.shape == parameter.shape) return;
  throw Error(ErrorKind::kData,
              format("{}: tensor '{}' has shape {}, the model needs {}", info.file, parameter.name,
                     shown(describe_shape(info.shape)), describe_shape(parameter.shape)),
              kOtherModel);
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

void refuse_unknown(const HfWeights& weights, const std::set<std::string>& known, const std::set<std::string>& unused) {
  const SafetensorsReader& files = weights.files();
  const std::string head = "lm_head.weight";
  const std::string embedding = "model.embed_tokens.weight";
  for (const std::string& name : files.names()) {
    const auto refuse = [&](const std::string& what, const char* hint) {
      throw Error(ErrorKind::kData, format("{}: {}", files.info(name).file, what), hint);
    };
    const std::string mine = text_model_name(name);
    if (mine != name && files.contains(mine)) {
      refuse(format("holds '{}' and '{}'", shown(mine), shown(name)),
             "the folder mixes two forms of the model; download it again");
    }
    if (known.contains(mine) || unused.contains(mine) || !weights.modality_of(name).empty()) continue;
    if (name != head || !known.contains(embedding)) {
      refuse(format("the model has no parameter '{}'", shown(name)), kOtherModel);
    }
    if (!equal_tensors(files, head, weights.name_in_file(embedding))) {
      refuse(format("'{}' differs from '{}', but the model ties them", head, embedding),
             "set model.tie_word_embeddings: false");
    }
  }
}

// The element at a place of the matrix view, by its place in the tensor: "[3, 17]".
std::string describe_element(const SafetensorsInfo& info, int64_t row, int64_t col) {
  std::vector<int64_t> index(info.shape.size());
  int64_t rest = row * info.cols() + col;
  for (size_t dim = index.size(); dim-- > 0; rest /= info.shape[dim]) index[dim] = rest % info.shape[dim];
  return format("[{}]", fmt::join(index, ", "));
}

}  // namespace

std::string text_model_name(const std::string& name_in_file) {
  if (!name_in_file.starts_with(kMultimodalText)) return name_in_file;
  return std::string(kText) + name_in_file.substr(kMultimodalText.size());
}

HfWeights::HfWeights(const std::filesystem::path& path) : files_(path) {
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::is_directory(path, ignored) ? path : path.parent_path();
  if (is_there(folder / "config.json")) towers_ = read_hf_towers(folder.string());
}

std::string HfWeights::name_in_file(const std::string& name) const {
  if (files_.contains(name) || !name.starts_with(kText)) return name;
  const std::string multimodal = std::string(kMultimodalText) + name.substr(kText.size());
  return files_.contains(multimodal) ? multimodal : name;
}

std::string HfWeights::modality_of(const std::string& name_in_file) const {
  for (const HfTower& tower : towers_) {
    for (const std::string& prefix : tower.prefixes) {
      if (name_in_file.starts_with(prefix)) return tower.modality;
    }
  }
  return "";
}

std::string HfWeights::describe_left_out() const {
  std::map<std::string, int64_t> counts;
  for (const std::string& name : files_.names()) {
    if (const std::string modality = modality_of(name); !modality.empty()) ++counts[modality];
  }
  std::string text;
  for (const auto& [modality, count] : counts) {
    text += format("{}{} tensors of {}", text.empty() ? "" : " and ", count, modality);
  }
  return text;
}

void read_finite_rows(const SafetensorsReader& reader, const std::string& name, Range rows, Range cols,
                      std::span<float> out) {
  reader.read_rows(name, rows, cols, out);
  const auto bad = std::find_if(out.begin(), out.end(), [](float value) { return !std::isfinite(value); });
  if (bad == out.end()) return;
  const SafetensorsInfo& info = reader.info(name);
  const int64_t at = bad - out.begin();
  throw Error(ErrorKind::kData,
              format("{}: tensor '{}': element {} is {}", info.file, name,
                     describe_element(info, rows.begin + at / cols.size(), cols.begin + at % cols.size()), *bad),
              "weights must be finite; the file is damaged, or its training had diverged");
}

std::vector<float> read_run(const SafetensorsReader& reader, const std::string& name, const Parameter& parameter,
                            const RowRun& run) {
  const int64_t rows = run.global.size();
  const int64_t cols = parameter.cols();
  std::vector<float> stored(static_cast<size_t>(rows * cols));
  if (!parameter.transposed) {
    read_finite_rows(reader, name, run.global, {0, cols}, stored);
    return stored;
  }
  const int64_t block = parameter.column_block;
  std::vector<float> logical(stored.size());
  read_finite_rows(reader, name, {0, parameter.shape[0]}, {run.global.begin * block, run.global.end * block}, logical);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t from = (col / block * rows + row) * block + col % block;
      stored[static_cast<size_t>(row * cols + col)] = logical[static_cast<size_t>(from)];
    }
  }
  return stored;
}

void load_hf_weights(const ParameterTable& table, const Stream& stream, const HfWeights& weights) {
  std::set<std::string> known;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      known.insert(parameter.name);
      check_shape(weights, parameter);
    }
  }
  refuse_unknown(weights, known, table.unused());
  if (table.flat_values().is_meta()) return;
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun& run, Range elements) {
    const std::vector<float> values = read_run(weights.files(), weights.name_in_file(parameter.name), parameter, run);
    write_f32(stream, values, table.flat_values(), elements);
  });
}

void export_hf_weights(const ParameterTable& table, const ProcessGroups& groups, const Stream& stream,
                       const std::filesystem::path& folder, int64_t max_shard_bytes) {
  if (groups.replica() != 0) return;
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
