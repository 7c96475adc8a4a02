#include <algorithm>

#include "app/commands.h"
#include "app/console.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/hf_weights.h"
#include "checkpoint/run_directory.h"
#include "config/hf_config.h"
#include "config/key_table.h"
#include "config/validate_model.h"
#include "train/dry_run.h"

namespace invar::app {
namespace {

constexpr int64_t kBlockElements = int64_t{64} << 20;

std::string name_of(const HfWeights& weights, const StateTensor& tensor) {
  return weights.name_in_file(tensor.name.substr(tensor.name.find('/') + 1));
}

// That in which an export gives the same bits back.
Precision precision_of(const HfWeights& weights, const std::vector<StateTensor>& tensors) {
  const bool is_bf16 = std::all_of(tensors.begin(), tensors.end(), [&](const StateTensor& tensor) {
    return weights.files().info(name_of(weights, tensor)).dtype == "BF16";
  });
  return is_bf16 ? Precision::kBF16 : Precision::kF32;
}

void import_tensor(const HfWeights& weights, const StateTensor& tensor, size_t index, ShardWriter& shard) {
  const std::string name = name_of(weights, tensor);
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, tensor.cols()));
  std::vector<float> values;
  for (int64_t row = 0; row < tensor.rows(); row += block) {
    const Range rows{row, std::min(row + block, tensor.rows())};
    values.resize(static_cast<size_t>(rows.size() * tensor.cols()));
    read_finite_rows(weights.files(), name, rows, {0, tensor.cols()}, values);
    shard.add(StateExtent(tensor, {{index, rows, values.data()}}));
  }
}

}  // namespace

int import_weights(const ImportArguments& arguments, MpiSession& session) {
  if (session.world().rank() != 0) return 0;
  Config config;
  config.model = read_hf_config(arguments.hf_folder);
  config.origin[""] = config.model.hf_path + "/config.json";
  validate_model(config);
  const HfWeights weights(arguments.hf_folder);
  Config shortest = config;  // the model is built to name its parameters, not to run
  shortest.train.sequence_length = 1;
  check_hf_weights(shortest, Topology{}, 0, weights);
  const RunDirectory directory(arguments.checkpoints);
  if (!directory.steps().empty()) {
    throw Error(ErrorKind::kConfig, format("{} holds checkpoints already", arguments.checkpoints), "name a new folder");
  }
  const FolderLock lock = directory.lock();
  if (const CleanUp clean_up = directory.prepare(0); !clean_up.done.empty()) print_line(clean_up.done);
  const std::filesystem::path pending = directory.pending_path_of(0);

  CheckpointIndex index;
  index.tensors = checkpoint_tensors(config.model);
  config.numerics.precision = precision_of(weights, index.tensors);
  index.info.config = to_portable_yaml(config);
  index.info.layout = "none: imported from " + arguments.hf_folder;
  ShardWriter shard(pending, 0);
  for (size_t i = 0; i < index.tensors.size(); ++i) import_tensor(weights, index.tensors[i], i, shard);
  WrittenShard written = shard.finish();
  index.files = {written.file};
  index.pieces = std::move(written.pieces);
  write_index(pending, index);
  directory.publish(0);
  const std::string left_out = weights.describe_left_out();
  if (!left_out.empty()) print_line(format("left out {}", left_out));
  print_line(format("imported {} to {}", arguments.hf_folder, directory.path_of(0).string()));
  return 0;
}

}  // namespace invar::app
