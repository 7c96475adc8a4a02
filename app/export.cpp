#include "app/commands.h"
#include "app/console.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/run_directory.h"
#include "checkpoint/safetensors.h"
#include "config/field.h"
#include "config/hf_config.h"
#include "config/yaml_loader.h"
#include "core/pending_file.h"

namespace invar::app {
namespace {

constexpr std::string_view kWeights = "model/";
constexpr int64_t kShardBytes = int64_t{5} << 30;
constexpr int64_t kBlockElements = int64_t{16} << 20;

Precision export_precision(const std::string& dtype, const Config& config) {
  Precision precision = config.numerics.precision;
  if (dtype.empty()) return precision;
  if (const auto refusal = assign(Field(&precision), {dtype, false})) {
    throw Error(ErrorKind::kConfig, format("--dtype {}", refusal->rule), refusal->fix);
  }
  return precision;
}

void export_tensor(const CheckpointReader& reader, const SafetensorsSpec& spec, SafetensorsWriter& writer) {
  const int64_t cols = spec.shape.size() == 1 ? 1 : spec.shape[1];
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, cols));
  std::vector<float> values;
  for (int64_t row = 0; row < spec.shape[0]; row += block) {
    const Range rows{row, std::min(row + block, spec.shape[0])};
    values.resize(static_cast<size_t>(rows.size() * cols));
    reader.read_rows(std::string(kWeights) + spec.name, rows, values);
    writer.write_rows(spec.name, row, rows.size(), values);
  }
}

}  // namespace

int export_checkpoint(const ExportArguments& arguments, MpiSession& session) {
  if (session.world().rank() != 0) return 0;
  const CheckpointReader reader(find_checkpoint(arguments.path));
  const Config config = load_config_text(reader.info().config, reader.folder().string());
  const Precision precision = export_precision(arguments.dtype, config);
  const DType dtype = precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
  claim_hf_folder(arguments.folder, "the export folder", "");
  std::vector<SafetensorsSpec> specs;
  for (const StateTensor& tensor : reader.index().tensors) {
    if (tensor.name.starts_with(kWeights)) specs.push_back({tensor.name.substr(kWeights.size()), dtype, tensor.shape});
  }
  const std::filesystem::path folder = arguments.folder;
  const std::vector<HfShard> shards = plan_hf_shards(specs, kShardBytes);
  for (const HfShard& shard : shards) {
    SafetensorsWriter writer(folder / shard.file, shard.tensors);
    for (const SafetensorsSpec& spec : shard.tensors) export_tensor(reader, spec, writer);
    writer.finish();
  }
  write_hf_index(folder, shards);
  write_text_file(folder / "config.json", to_hf_config(config.model, precision));
  print_line(format("exported step {} of {} to {}", reader.info().step, reader.folder().string(), folder.string()));
  return 0;
}

}  // namespace invar::app
