#include "train/trainer.h"

#include <chrono>
#include <exception>
#include <fstream>
#include <optional>
#include <sstream>

#include "checkpoint/hf_weights.h"
#include "config/hf_config.h"
#include "config/key_table.h"
#include "config/resolved.h"
#include "device/memory.h"
#include "models/model_flops.h"
#include "observe/console.h"
#include "observe/metrics.h"
#include "observe/throughput.h"
#include "train/step_dump.h"

namespace invar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

TokenRequest request_for(const Config& config, Split split, int world_size) {
  TokenRequest request;
  request.split = split;
  request.sequence_length = config.train.sequence_length;
  request.vocab_size = config.model.vocab_size;
  request.seed = config.train.seed;
  const int64_t batches = split == Split::kTrain ? config.train.steps : config.train.eval_batches;
  request.samples_wanted = batches * global_batch_size(config, world_size);
  return request;
}

DataStream stream_of(const TokenSource& source, const Config& config, Split split) {
  return {source, Sampler(sample_order(config.data, split), source.samples(), config.train.seed)};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path);
  file << text;
  if (!file.flush())
    throw Error(ErrorKind::kFault, format("cannot write {}", path.string()), "check space and permissions");
}

[[noreturn]] void refuse_export(const std::string& folder, const std::string& reason) {
  throw Error(ErrorKind::kConfig, format("checkpoint.export_dir = {} {}", folder, reason),
              "name a folder, new or without weights, where this user may write");
}

// At the start of the run, so that a wrong path does not show only at its end. Weights of another run are not
// overwritten: old shards beside a new file would make a folder of two models.
void prepare_export_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse_export(folder, "cannot be created: " + error.message());
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path& path = entry->path();
    if (path.extension() == ".safetensors") refuse_export(folder, format("holds {} already", path.filename().string()));
  }
  const fs::path probe = fs::path(folder) / ".invar_probe";
  if (error || !std::ofstream(probe)) refuse_export(folder, "cannot be written");
  fs::remove(probe, error);
}

std::string mib(int64_t bytes) {
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

// What a run shows; only rank 0 has metrics.
struct Trainer::Output {
  Log& log;
  Throughput throughput;
  std::unique_ptr<MetricsWriter> metrics;
  int64_t tokens = 0;  // trained on so far
};

Trainer::Trainer(const Config& config, const ProcessGroups& groups, const Stream& stream)
    : config_(config), groups_(groups), stream_(stream) {
  const int world = groups.world->size();
  train_source_ = make_token_source(config.data, request_for(config, Split::kTrain, world));
  if (config.train.eval_every > 0) {
    validation_source_ = make_token_source(config.data, request_for(config, Split::kValidation, world));
  }
  if (config.model.init == InitKind::kHuggingFace) {
    weights_ = std::make_unique<SafetensorsReader>(config.model.hf_path);
    check_hf_weights(config, groups.topology, groups.world->rank(), *weights_);
  }
  const std::string& export_dir = config.checkpoint.export_dir;
  if (groups.world->rank() == 0 && !export_dir.empty()) prepare_export_folder(export_dir);
}

void Trainer::fill_weights(TrainState& state) const {
  if (weights_ != nullptr) {
    load_hf_weights(state.parameters(), *weights_);
  } else {
    initialise(state.parameters(), stream_, config_.train.seed, config_.model.initializer_range);
  }
  state.adopt_values();
}

void Trainer::describe(Log& log, const MemorySizes& memory) const {
  std::istringstream resolved(to_yaml(config_));
  for (std::string line; std::getline(resolved, line);) log.info(line);
  const Topology& grid = groups_.topology;
  log.info(format("{} ranks: tensor {}{} x data {}, {} threads each on {}", grid.world(), grid.tensor,
                  config_.parallel.sequence && grid.tensor > 1 ? " with sequence parallelism" : "", grid.data,
                  stream_.threads(), name_of(stream_.device())));
  const int64_t batch = global_batch_size(config_, grid.world());
  log.info(format("batch: {} sequences of {} = {} tokens a step, {} micro-steps of {}", batch,
                  config_.train.sequence_length, batch * config_.train.sequence_length,
                  batch / (config_.train.micro_batch_size * grid.data), config_.train.micro_batch_size));
  log.info(format("memory of rank 0: {} (parameters {}, gradients {}, optimizer {}, activations {}, scratch {})",
                  mib(memory.total()), mib(memory.parameters), mib(memory.gradients), mib(memory.optimizer),
                  mib(memory.saved), mib(memory.scratch + memory.constants)));
  log.info("training data: " + train_source_->describe());
  if (validation_source_ != nullptr) log.info("validation data: " + validation_source_->describe());
}

void Trainer::run(Log& log) {
  const int rank = groups_.world->rank();
  const MemorySizes memory = measure_memory(config_, groups_.topology, rank);
  describe(log, memory);
  TrainState state(config_, groups_, stream_, memory);
  fill_weights(state);

  const double flops = model_flops_per_step(
      decoder_spec(config_.model), global_batch_size(config_, groups_.world->size()), config_.train.sequence_length);
  Output output{log, Throughput(flops, groups_.world->size()), nullptr};
  if (rank == 0 && !config_.log.dir.empty()) {
    write_text(std::filesystem::path(config_.log.dir) / "config.yaml", to_yaml(config_));
    output.metrics = std::make_unique<MetricsWriter>(config_.log.dir, OpenMode::kNew);
  }
  train(state, output);
  if (!config_.checkpoint.export_dir.empty()) export_weights(state, log);
}

void Trainer::train(TrainState& state, Output& output) {
  const DataStream data = stream_of(*train_source_, config_, Split::kTrain);
  for (int64_t step = 0; step < config_.train.steps; ++step) {
    std::optional<Error> failure;
    try {
      train_step(state, data, output, step);
    } catch (const Error& error) {
      failure = error.in(format("step {}", step + 1));
    } catch (const std::exception& error) {
      failure = Error(ErrorKind::kFault, format("step {}: {}", step + 1, error.what()));
    }
    if (failure) {
      output.log.error(failure->what());
      throw *failure;
    }
  }
}

void Trainer::train_step(TrainState& state, const DataStream& data, Output& output, int64_t step) const {
  const auto start = Clock::now();
  const std::vector<Batch> batches = load_micro_batches(config_, groups_, data, step);
  StepHooks hooks;
  std::optional<StepDump> dump;
  if (step + 1 == config_.log.dump_step) {
    dump.emplace(config_, groups_, state.model().vocabulary());
    hooks.sink = &*dump;
    hooks.gradients_complete = [&](const StepResult& complete) {
      output.log.info("dumped to " + dump->write(state, batches, complete, step + 1).string());
    };
  }
  const StepResult result = run_step(state, config_, groups_, batches, step, hooks);
  const double seconds = seconds_since(start);
  output.tokens += result.tokens;
  output.throughput.record(seconds, result.tokens);
  const bool last = step + 1 == config_.train.steps;
  if (last || (step + 1) % config_.log.every == 0) report(result, seconds, output, step);
  const bool due = config_.train.eval_every > 0 && ((step + 1) % config_.train.eval_every == 0 || last);
  if (due) evaluate(state, output, step + 1);
}

void Trainer::report(const StepResult& result, double seconds, Output& output, int64_t step) const {
  const int64_t peak = all_reduce_value(*groups_.world, peak_memory_bytes(), ReduceOp::kMax);
  if (groups_.world->rank() != 0) return;
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.steps_total = config_.train.steps;
  metrics.tokens = output.tokens;
  metrics.loss = result.loss;
  metrics.grad_norm = result.grad_norm;
  metrics.lr = result.lr;
  metrics.step_ms = seconds * 1e3;
  metrics.tokens_per_s = output.throughput.tokens_per_s();
  metrics.tflops_per_device = output.throughput.tflops_per_device();
  metrics.memory_peak_bytes = peak;
  if (output.metrics != nullptr) output.metrics->write(metrics);
  output.log.info(console_line(metrics, output.throughput.seconds_left(config_.train.steps - step - 1)));
}

void Trainer::evaluate(TrainState& state, Output& output, int64_t step) const {
  const DataStream data = stream_of(*validation_source_, config_, Split::kValidation);
  const double loss = run_evaluation(state, config_, groups_, data);
  if (groups_.world->rank() != 0) return;
  const EvaluationMetrics metrics{step, config_.train.steps, loss};
  if (output.metrics != nullptr) output.metrics->write(metrics);
  output.log.info(console_line(metrics));
}

void Trainer::export_weights(const TrainState& state, Log& log) const {
  const std::filesystem::path folder = config_.checkpoint.export_dir;
  export_hf_weights(state.parameters(), groups_, stream_, folder);
  if (groups_.world->rank() != 0) return;
  write_text(folder / "config.json", to_hf_config(config_.model, config_.numerics.precision));
  log.info(format("exported the weights to {}", folder.string()));
}

}  // namespace invar
