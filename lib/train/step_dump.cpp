#include "train/step_dump.h"

#include <algorithm>

#include "checkpoint/hdf5_file.h"
#include "config/field.h"
#include "config/resolved.h"
#include "parallel/logical_tensor.h"
#include "train/run_outputs.h"

namespace invar {
namespace {

constexpr const char* kLogits = "logits";
constexpr int64_t kBlockElements = 4 << 20;  // of an activation, gathered at once

std::string layout_of(const Config& config, const ProcessGroups& groups) {
  return format("{}, micro-batch {}, recompute {}", groups.topology.describe(config.parallel.sequence),
                config.train.micro_batch_size, word_of(config.train.recompute));
}

// What this rank owns of a parameter's gradient: runs, and their values one after another.
struct OwnedGradient {
  std::vector<RowRun> runs;
  std::vector<float> values;
};

OwnedGradient owned_gradient(const TrainState& state, const Parameter& parameter) {
  OwnedGradient gradient;
  for (const OwnedRows& own : state.ownership().owned_rows()) {
    if (own.parameter != &parameter) continue;
    gradient.runs.push_back({own.rows, 0});
    const std::vector<float> values = read_f32(state.stream(), state.parameters().flat_gradients(), own.elements);
    gradient.values.insert(gradient.values.end(), values.begin(), values.end());
  }
  return gradient;
}

}  // namespace

StepDump::StepDump(const Config& config, const ProcessGroups& groups, Range vocabulary)
    : config_(config),
      groups_(groups),
      vocabulary_(intersect(vocabulary, {0, config.model.vocab_size})),
      batch_(global_batch_size(config, groups.world->size())) {}

StepDump::~StepDump() = default;

bool StepDump::wants(std::string_view name) const {
  if (name == kLogits) return true;
  // Without sequence parallelism every tensor rank has the same rows.
  return name.starts_with("hidden.") && (config_.parallel.sequence || groups_.tensor->rank() == 0);
}

void StepDump::record(const std::string& name, const Tensor& local, int64_t first_row) {
  const int64_t rows = local.dim(0);
  const int64_t width = local.dim(1);
  Piece piece{{first_row, first_row + rows},
              name == kLogits ? vocabulary_ : Range{0, width},
              read_f32(Stream(DeviceType::kCpu), local, {0, local.numel()})};
  const int64_t kept = piece.cols.size();
  if (kept < width) {  // columns that pad the vocabulary
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(piece.values.begin() + row * width, kept, piece.values.begin() + row * kept);
    }
    piece.values.resize(static_cast<size_t>(rows * kept));
  }
  std::vector<MicroBatchPieces>& micro_steps = activations_[name];
  // Rows of a micro-batch come in ascending order: those that do not are of the next one.
  if (micro_steps.empty() || first_row <= micro_steps.back().back().rows.begin) micro_steps.emplace_back();
  micro_steps.back().push_back(std::move(piece));
}

std::filesystem::path StepDump::write(const TrainState& state, std::span<const Batch> batches, const StepResult& result,
                                      int64_t step) {
  const Stream& stream = state.stream();
  std::filesystem::path path = dump_path(config_.log.dir, step);
  if (is_root()) {
    file_ = std::make_unique<Hdf5Writer>(path);
    write_attributes(step);
    file_->write<double>("loss", std::vector<int64_t>{1}, std::span(&result.loss, 1));
    file_->write<double>("grad_norm", std::vector<int64_t>{1}, std::span(&result.grad_norm, 1));
  }
  write_ids(stream, "tokens", batches, &Batch::tokens);
  write_ids(stream, "labels", batches, &Batch::labels);
  for (int64_t layer = 0; layer < config_.model.num_hidden_layers; ++layer) {
    write_activation(stream, format("hidden.{}", layer), config_.model.hidden_size);
  }
  write_activation(stream, kLogits, config_.model.vocab_size);
  write_gradients(state);
  if (is_root()) file_->finish_with_sum();
  return path;
}

void StepDump::write_attributes(int64_t step) {
  file_->set_attribute("step", step);
  file_->set_attribute("layout", layout_of(config_, groups_));
  file_->set_attribute("precision", config_.numerics.precision == Precision::kBF16 ? "bf16" : "fp32");
  file_->set_attribute("version", INVAR_VERSION);
}

void StepDump::write_ids(const Stream& stream, const std::string& name, std::span<const Batch> batches,
                         std::vector<int32_t> Batch::*member) {
  if (groups_.tensor->rank() != 0) return;  // its tensor group's batches are the same
  std::vector<int32_t> ids;
  for (const Batch& batch : batches) ids.insert(ids.end(), (batch.*member).begin(), (batch.*member).end());
  if (!is_root()) {
    groups_.readers().send(stream, view_of(ids), 0);
    return;
  }
  const int64_t sequence_length = config_.train.sequence_length;
  file_->create(name, DType::kI32, std::vector<int64_t>{batch_, sequence_length});
  for (int rank = 0; rank < groups_.readers().size(); ++rank) {
    const Range samples = groups_.topology.samples_of(batch_, rank);
    ids.resize(static_cast<size_t>(samples.size() * sequence_length));
    if (rank > 0) groups_.readers().receive(stream, view_of(ids), rank);
    file_->write_rows<int32_t>(name, samples.begin, ids);
  }
}

void StepDump::write_activation(const Stream& stream, const std::string& name, int64_t cols) {
  const int64_t tokens = config_.train.micro_batch_size * config_.train.sequence_length;  // of a micro-batch
  const int64_t block = std::clamp<int64_t>(kBlockElements / cols, 1, tokens);
  if (is_root()) file_->create(name, DType::kF32, std::vector<int64_t>{batch_, config_.train.sequence_length, cols});
  int64_t first_token = 0;  // in the global batch
  for (int reader = 0; reader < groups_.topology.readers(); ++reader) {
    const int64_t micro_steps = groups_.topology.samples_of(batch_, reader).size() / config_.train.micro_batch_size;
    for (int64_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
      for (int64_t row = 0; row < tokens; row += block) {
        const Range rows{row, std::min(tokens, row + block)};
        const std::vector<float> values =
            gather_block(stream, name, reader, static_cast<size_t>(micro_step), rows, cols);
        if (is_root()) file_->write_rows<float>(name, first_token + row, values);
      }
      first_token += tokens;
    }
  }
  activations_.erase(name);
}

// (rows, cols) on the root, out of the pieces of all ranks that read these samples; empty elsewhere.
std::vector<float> StepDump::gather_block(const Stream& stream, const std::string& name, int reader, size_t micro_step,
                                          Range rows, int64_t cols) const {
  std::vector<int64_t> bounds;  // row begin, row end, column begin, column end of each piece
  std::vector<float> values;
  if (groups_.reader() == reader && activations_.contains(name)) {
    for (const Piece& piece : activations_.at(name).at(micro_step)) {
      const Range part = intersect(piece.rows, rows);
      if (part.empty()) continue;
      bounds.insert(bounds.end(), {part.begin, part.end, piece.cols.begin, piece.cols.end});
      const auto from = piece.values.begin() + (part.begin - piece.rows.begin) * piece.cols.size();
      values.insert(values.end(), from, from + part.size() * piece.cols.size());
    }
  }
  Communicator& world = *groups_.world;
  if (!is_root()) {
    if (groups_.reader() != reader) return {};
    std::vector<int64_t> sizes = {std::ssize(bounds), std::ssize(values)};
    world.send(stream, view_of(sizes), 0);
    world.send(stream, view_of(bounds), 0);
    world.send(stream, view_of(values), 0);
    return {};
  }
  std::vector<float> block(static_cast<size_t>(rows.size() * cols));
  int64_t filled = 0;
  for (int from = 0; from < world.size(); ++from) {
    if (groups_.topology.reader_of(from) != reader) continue;
    if (from != 0) {
      std::vector<int64_t> sizes(2);
      world.receive(stream, view_of(sizes), from);
      bounds.resize(static_cast<size_t>(sizes[0]));
      values.resize(static_cast<size_t>(sizes[1]));
      world.receive(stream, view_of(bounds), from);
      world.receive(stream, view_of(values), from);
    }
    auto next = values.begin();
    for (size_t i = 0; i + 3 < bounds.size(); i += 4) {
      const int64_t width = bounds[i + 3] - bounds[i + 2];
      for (int64_t row = bounds[i]; row < bounds[i + 1]; ++row, next += width) {
        std::copy_n(next, width, block.begin() + (row - rows.begin) * cols + bounds[i + 2]);
      }
    }
    filled += std::ssize(values);
  }
  INVAR_CHECK(filled == std::ssize(block), "{}: {} elements of {} recorded", name, filled, block.size());
  return block;
}

void StepDump::write_gradients(const TrainState& state) {
  for (const Weight& weight : state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      if (!parameter.trained) continue;
      OwnedGradient mine = owned_gradient(state, parameter);
      const std::vector<float> logical =
          collect_runs(*groups_.world, state.stream(), parameter, mine.runs, std::move(mine.values));
      if (is_root()) file_->write<float>("grad." + parameter.name, parameter.shape, logical);
    }
  }
}

}  // namespace invar
