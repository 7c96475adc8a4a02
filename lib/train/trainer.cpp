#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <optional>
#include <sstream>

#include "checkpoint/hf_weights.h"
#include "comm/checks.h"
#include "config/hf_config.h"
#include "config/key_table.h"
#include "config/resolved.h"
#include "core/pending_file.h"
#include "data/document_end.h"
#include "device/device.h"
#include "device/memory.h"
#include "models/model_flops.h"
#include "observe/console.h"
#include "observe/metrics.h"
#include "observe/throughput.h"
#include "parallel/check_inputs.h"
#include "parallel/host_share.h"
#include "train/copy_check.h"
#include "train/dry_run.h"
#include "train/proof_log.h"
#include "train/run_inputs.h"
#include "train/run_outputs.h"
#include "train/step_dump.h"

namespace invar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr const char* kExportKey = "checkpoint.export_dir";

// What marks an export as this run's, which may replace it when it is started again.
std::string export_owner(const Config& config) {
  const std::string dir = checkpoint_dir(config).empty() ? config.log.dir : checkpoint_dir(config);
  return dir.empty() ? "" : std::filesystem::weakly_canonical(dir).string();
}

std::string mib(int64_t bytes) {
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string describe_memory(const MemorySizes& memory) {
  return format("{} (parameters {}, gradients {}, optimizer {}, activations {}, scratch {})", mib(memory.total()),
                mib(memory.parameters), mib(memory.gradients), mib(memory.optimizer), mib(memory.saved),
                mib(memory.scratch + memory.constants));
}

// Before anything is allocated: what the arenas need does not fit in the host or on the GPU. After a step the libraries
// have theirs. Collective over the world.
void refuse_too_large(const MemorySizes& memory, const Stream& stream, bool after_a_step, Communicator& world) {
  constexpr const char* kUseLess =
      "use more ranks, a smaller train.micro_batch_size or train.recompute: selective or full";
  if (stream.device() == DeviceType::kCpu) {
    const HostMemory host = host_memory();  // before any rank takes some
    const HostShare needed = share_of_host(world, memory.total());
    if (needed.sum <= host.available) return;
    const std::string all =
        needed.ranks > 1 ? format(", the {} ranks of this host {}", needed.ranks, mib(needed.sum)) : "";
    throw Error(ErrorKind::kFault,
                format("out of memory: a rank needs {}{}; the host has {} left of {}", describe_memory(memory), all,
                       mib(host.available), mib(host.total)),
                kUseLess);
  }
  const CudaMemoryInfo gpu = cuda_memory_info();
  const int64_t beside = after_a_step ? 0 : kOutsideArenas + memory.proofs;
  if (memory.total() + beside <= gpu.free) return;
  const std::string libraries =
      after_a_step ? "" : format(" and {} for the libraries' workspaces and proofs", mib(beside));
  throw Error(ErrorKind::kFault,
              format("out of GPU memory: the run needs {}{}; of {} {} are free", describe_memory(memory), libraries,
                     mib(gpu.total), mib(gpu.free)),
              kUseLess);
}

// What did not fit is one of these.
std::unique_ptr<TrainState> allocate_state(const Config& config, const ProcessGroups& groups, const Stream& stream,
                                           const MemorySizes& memory) {
  try {
    return std::make_unique<TrainState>(config, groups, stream, memory);
  } catch (const OutOfMemory& error) {
    throw error.in(
        format("memory of rank {}, {}", groups.world->job_rank(groups.world->rank()), describe_memory(memory)));
  }
}

void check_single_steps(const Config& config, const Stream& stream, const RunCheckpoints& checkpoints) {
  const int64_t done = checkpoints.start().step;
  for (const auto& [key, step] :
       {std::pair("log.dump_step", config.log.dump_step), std::pair("log.profile_step", config.log.profile_step)}) {
    if (step == 0 || step > done || checkpoints.continues_run()) continue;
    throw Error(ErrorKind::kConfig, format("{} = {}, but the run resumes after step {}", key, step, done),
                "name a later step, or resume from an earlier checkpoint");
  }
  if (config.log.profile_step > 0 && stream.device() != DeviceType::kCuda) {
    throw Error(ErrorKind::kConfig, format("log.profile_step = {} is for profilers of GPUs", config.log.profile_step),
                "set device: cuda, or log.profile_step: 0");
  }
}

}  // namespace

// What a run shows; only rank 0 has metrics.
struct Trainer::Output {
  Log& log;
  Throughput throughput;
  SpikeDetector spikes;
  std::unique_ptr<MetricsWriter> metrics;
  std::unique_ptr<StateHashWriter> hashes;  // with log.hash_every
  Progress progress;
  LeftOutSteps left_out;
  std::unique_ptr<CopyCheck> copies{};  // of a run that hashes or saves
  ProofLog proofs{};
  std::optional<double> spike{};  // of the last step
  bool metrics_fail = false;

  // A full disk under the metrics does not end a run.
  template <class Action>
  void attempt(Action action) {
    if (metrics == nullptr) return;
    try {
      action();
      metrics_fail = false;
    } catch (const std::exception& error) {
      if (!metrics_fail) log.warn(format("{}; training goes on", error.what()));
      metrics_fail = true;
    }
  }
};

Trainer::Trainer(const Config& config, const ProcessGroups& groups, const Stream& stream, StopControl& stop,
                 ReplicaWork* work)
    : config_(config),
      groups_(groups),
      stream_(stream),
      checkpoints_(config, groups, stream),
      stop_(stop),
      work_(work) {
  const int world = groups.world->size();
  TokenRequest request = token_request(config, Split::kTrain, world);
  const Progress& start = checkpoints_.start();  // of which another batch size may have been
  request.samples_wanted =
      start.samples + std::max<int64_t>(0, config.train.steps - start.step) * global_batch_size(config, world);
  train_source_ = make_token_source(config.data, request);
  check_single_steps(config, stream, checkpoints_);
  if (config.train.eval_every > 0) {
    validation_source_ = make_token_source(config.data, token_request(config, Split::kValidation, world));
  }
  if (config.model.init == InitKind::kHuggingFace && !checkpoints_.resumes()) {
    weights_ = std::make_unique<HfWeights>(config.model.hf_path);
    check_hf_weights(config, groups.topology, groups.world->rank(), *weights_);
  }
  if (groups.world->rank() == 0) {
    document_warning_ =
        warn_of_no_document_end(config.data, *train_source_, data_stream(*train_source_, config, Split::kTrain).sampler,
                                start.samples, request.samples_wanted - start.samples);
  }
  inputs_ = run_inputs(*train_source_, weights_ != nullptr ? config.model.hf_path : "", checkpoints_.path());
  const std::string& export_dir = config.checkpoint.export_dir;
  if (groups.world->rank() == 0 && !export_dir.empty()) prepare_hf_folder(export_dir, kExportKey, export_owner(config));
}

void Trainer::fill_weights(TrainState& state) const {
  if (weights_ != nullptr) {
    load_hf_weights(state.parameters(), stream_, *weights_);
  } else {
    initialise(state.parameters(), stream_, config_.train.seed, config_.model.initializer_range);
  }
  state.adopt_values();
}

void Trainer::describe(Log& log, const MemorySizes& memory) const {
  std::istringstream resolved(to_yaml(config_));
  for (std::string line; std::getline(resolved, line);) log.info(line);
  const Topology& grid = groups_.topology;
  log.info(format("{} ranks: {}, {} threads each on {}", grid.world(), grid.describe(config_.parallel.sequence),
                  stream_.threads(), name_of(stream_.device())));
  const int64_t batch = global_batch_size(config_, grid.world());
  log.info(format("batch: {} sequences of {} = {} tokens a step, {} micro-steps of {}", batch,
                  config_.train.sequence_length, batch * config_.train.sequence_length,
                  grid.describe_micro_steps(batch, config_.train.micro_batch_size), config_.train.micro_batch_size));
  if (stream_.device() == DeviceType::kCuda) {
    const CudaMemoryInfo gpu = cuda_memory_info();
    log.info(format("GPU of rank 0: {}, {} free", describe_cuda_device(current_cuda_device()), mib(gpu.free)));
  }
  if (const auto contract = run_contract(config_, stream_)) log.info("numerics contract " + contract->describe());
  log.info("memory of rank 0: " + describe_memory(memory));
  log.info("training data: " + train_source_->describe());
  if (!document_warning_.empty()) log.warn(document_warning_);
  for (const TokenSource* source : {train_source_.get(), validation_source_.get()}) {
    if (source == nullptr) continue;
    for (const std::string& warning : source->warnings()) log.warn(warning);  // any rank may have built an order
  }
  if (validation_source_ != nullptr) {
    const int64_t samples = evaluation_samples(config_, *validation_source_, grid.world());
    log.info(format("validation data: {}; an evaluation reads {} samples{}", validation_source_->describe(), samples,
                    samples == validation_source_->samples() ? ", all of the split" : ""));
  }
  if (weights_ != nullptr) {
    const std::string left_out = weights_->describe_left_out();
    if (!left_out.empty()) log.info(format("weights of {}: left out {}", config_.model.hf_path, left_out));
  }
  checkpoints_.describe(log);
}

Ending Trainer::run(Log& log) {
  checkpoints_.agree();
  check_inputs(inputs_, *groups_.world);
  const int rank = groups_.world->rank();
  const MemorySizes memory = measure_memory(config_, groups_.topology, rank, stream_.device());
  describe(log, memory);
  refuse_too_large(memory, stream_, stop_.steps() > 0, *groups_.world);
  const std::unique_ptr<TrainState> own = allocate_state(config_, groups_, stream_, memory);
  TrainState& state = *own;
  for (const std::string& line : state.explain_attention()) log.info("attention of " + line);
  if (checkpoints_.resumes()) {
    checkpoints_.load(state);
  } else {
    fill_weights(state);
  }

  const double flops = model_flops_per_step(
      decoder_spec(config_.model), global_batch_size(config_, groups_.world->size()), config_.train.sequence_length);
  Output output{log,
                Throughput(flops, groups_.world->size()),
                SpikeDetector(config_.train.spike_zscore),
                nullptr,
                nullptr,
                checkpoints_.start(),
                LeftOutSteps(config_)};
  if (rank == 0) checkpoints_.set_earlier_run_aside(log);
  if (rank == 0 && !config_.log.dir.empty()) {
    const std::filesystem::path dir = config_.log.dir;
    if (!checkpoints_.continues_run()) {
      if (const std::string kept = keep_earlier_run(dir); !kept.empty()) log.info(kept);
    }
    write_text_file(dir / kConfigFile, to_yaml(config_));
    output.metrics = std::make_unique<MetricsWriter>(dir);
    if (config_.log.hash_every > 0) output.hashes = std::make_unique<StateHashWriter>(dir);
  }
  const bool exports = !config_.checkpoint.export_dir.empty();
  if (config_.log.hash_every > 0 || checkpoints_.saves() || exports) {
    output.copies = std::make_unique<CopyCheck>(state, groups_, output.progress.step);
    checkpoints_.compare_before_saving(*output.copies);
  }
  const Ending ending = train(state, output);
  if (work_ != nullptr && ending != Ending::kReshare) {
    if (const auto measured = work_->speeds()) log.info(format("measured speeds: {}", measured->describe()));
  }
  const std::optional<Error> unsaved =
      checkpoints_.finish(state, output.progress, output.left_out.nonfinite_in_a_row() > 1, log);
  if (ending == Ending::kDone && exports) {
    output.copies->check(output.progress.step);
    export_weights(state, log);
  }
  if (unsaved) throw *unsaved;
  return ending;
}

Ending Trainer::train(TrainState& state, Output& output) {
  DataStream data = data_stream(*train_source_, config_, Split::kTrain);
  Progress& progress = output.progress;
  const int64_t first = progress.step;
  data.first_sample = progress.samples - first * global_batch_size(config_, groups_.world->size());
  if (first >= config_.train.steps) output.log.info(format("step {} is trained already", config_.train.steps));
  progress.evaluation_due = progress.evaluation_due && validation_source_ != nullptr;
  if (progress.evaluation_due && !evaluate(state, output).empty()) return Ending::kStopped;
  while (progress.step < config_.train.steps) {
    const int64_t step = progress.step + 1;
    std::string stop;
    std::optional<Error> failure;
    try {
      stop = train_step(state, data, output);
      if (stop.empty()) stop = stop_.after_step(*groups_.world);
      const bool saving = stop.empty() && checkpoints_.after_step(state, progress,
                                                                  output.left_out.nonfinite_in_a_row() > 0, output.log);
      if (saving && should_reshare(output, stop)) return Ending::kReshare;
    } catch (const Error& error) {
      failure = error.in(format("step {}", step));
    } catch (const std::exception& error) {
      failure = Error(ErrorKind::kFault, format("step {}: {}", step, error.what()));
    }
    if (failure) {
      output.log.error(failure->what());
      throw *failure;
    }
    if (!stop.empty() && (step < config_.train.steps || progress.evaluation_due)) {
      output.log.info(format("stopping after step {}: {}", step, stop));
      return Ending::kStopped;
    }
  }
  return Ending::kDone;
}

// At a checkpoint: whether to go on from it with other shares of the batch, or, if that came up, why to stop at it.
// Collective, with one answer for all.
bool Trainer::should_reshare(const Output& output, std::string& stop) {
  const int64_t step = output.progress.step;
  if (work_ == nullptr || !config_.parallel.nonuniform.reshare || step == config_.train.steps) return false;
  work_->gather(groups_);
  const std::optional<MeasuredSpeeds> news = work_->news();
  if (!news || !checkpoints_.wait_until_saved(step, output.log)) return false;
  stop = stop_.reason(*groups_.world, stop_.steps());
  if (!stop.empty()) return false;
  work_->told();
  output.log.info(format("step {}: from now on {}", step, news->describe()));
  return true;
}

// Why the run should stop, if it came up.
std::string Trainer::train_step(TrainState& state, const DataStream& data, Output& output) {
  const auto start = Clock::now();
  Progress& progress = output.progress;
  const int64_t step = progress.step;
  const std::vector<Batch> batches = load_micro_batches(config_, groups_, data, step);
  const bool last = step + 1 == config_.train.steps;
  const auto is_due = [&](int64_t every) { return every > 0 && (last || (step + 1) % every == 0); };
  StepHooks hooks;
  std::optional<StepDump> dump;
  std::optional<StepHash> hash;
  if (step + 1 == config_.log.dump_step) {
    dump.emplace(config_, groups_, state.model().vocabulary());
    hooks.sink = &*dump;
  }
  if (is_due(config_.log.hash_every)) hash.emplace(state, groups_);
  hooks.gradients_complete = [&](const StepResult& complete) {
    if (dump) output.log.info("dumped to " + dump->write(state, batches, complete, step + 1).string());
    if (hash) hash->gradients();
    if (config_.log.hash_every == 0 || !std::isfinite(complete.grad_norm)) return;
    output.copies->look();
    if (hash) output.copies->look_at_masters();
  };
  if (work_ != nullptr) hooks.work = work_->next_timer();
  const bool profiled = step + 1 == config_.log.profile_step;
  if (profiled) start_profile(stream_);
  const StepResult result = run_step(state, config_, groups_, batches, step, hooks);
  if (profiled) stop_profile(stream_);
  if (work_ != nullptr) work_->finish_step();
  output.proofs.tell(state.stream(), output.log);
  if (const std::optional<Error> too_many = output.left_out.add(result)) {
    checkpoints_.wait(output.log);
    throw *too_many;
  }
  const StateHash* const hashed = hash ? &hash->finish() : nullptr;
  if (hash) compare_copies(result, output);
  const double seconds = seconds_since(start);
  ++progress.step;
  progress.samples += global_batch_size(config_, groups_.world->size());
  progress.tokens += result.tokens;
  if (result.left_out()) ++progress.skipped_steps;
  output.throughput.record(seconds, result.tokens);
  output.spike = output.spikes.add(result.loss);
  report_anomalies(result, output);
  if (hash || is_due(config_.log.every)) report(result, seconds, hashed, output);
  return is_due(config_.train.eval_every) ? evaluate(state, output) : "";
}

// After a hashed step.
void Trainer::compare_copies(const StepResult& result, Output& output) {
  try {
    if (!result.left_out()) output.copies->look();  // also what the last step of a run leaves
    output.copies->compare(output.progress.step + 1);
  } catch (const WaitFailed&) {
    throw;
  } catch (const Error&) {  // on every rank
    checkpoints_.wait(output.log);
    throw;
  }
}

void Trainer::report_anomalies(const StepResult& result, Output& output) const {
  if (groups_.world->rank() != 0) return;
  if (result.left_out()) {
    output.log.warn(format("step {}: {}; left out ({} so far)", output.progress.step, output.left_out.why(result),
                           output.progress.skipped_steps));
  }
  if (output.spike) {
    output.log.warn(format("step {}: loss {:.4f} is {:.1f} standard deviations above the mean of those before it",
                           output.progress.step, result.loss, *output.spike));
  }
}

void Trainer::report(const StepResult& result, double seconds, const StateHash* hash, Output& output) const {
  const int64_t peak = all_reduce_value(*groups_.world, peak_memory_bytes(stream_), ReduceOp::kMax);
  StepMetrics metrics;
  if (work_ != nullptr) metrics.replica_seconds = work_->gather(groups_);
  if (groups_.world->rank() != 0) return;
  metrics.step = output.progress.step;
  metrics.steps_total = config_.train.steps;
  metrics.tokens = output.progress.tokens;
  if (result.tokens > 0) metrics.loss = result.loss;
  metrics.grad_norm = result.grad_norm;
  metrics.lr = result.lr;
  metrics.step_ms = seconds * 1e3;
  metrics.tokens_per_s = output.throughput.tokens_per_s();
  metrics.tflops_per_device = output.throughput.tflops_per_device();
  metrics.memory_peak_bytes = peak;
  metrics.skipped_steps = output.progress.skipped_steps;
  metrics.spike = output.spike;
  if (hash != nullptr) metrics.state_hash = hash->digest(result.loss, result.grad_norm);
  output.attempt([&] {
    output.metrics->write(metrics);
    if (hash != nullptr) output.hashes->write(metrics.step, *hash);
    if (hash != nullptr && config_.log.hash_blocks) write_block_hashes(config_.log.dir, metrics.step, *hash);
  });
  output.log.info(console_line(metrics, output.throughput.seconds_left(config_.train.steps - metrics.step)));
  if (work_ == nullptr || config_.parallel.nonuniform.reshare) return;  // should_reshare() tells what it does
  if (const auto news = work_->news()) {
    work_->told();
    output.log.info(format("step {}: {}", metrics.step, news->describe()));
  }
}

// Why the run should stop, if it came up; then there is no result.
std::string Trainer::evaluate(TrainState& state, Output& output) const {
  const DataStream data = data_stream(*validation_source_, config_, Split::kValidation);
  std::string reason;
  output.progress.evaluation_due = true;
  const auto stop = [&] {
    reason = stop_.reason(*groups_.world, 0);
    return !reason.empty();
  };
  const std::optional<Evaluation> result = run_evaluation(state, config_, groups_, data, stop);
  output.proofs.tell(state.stream(), output.log);
  output.progress.evaluation_due = !result;
  if (!result || groups_.world->rank() != 0) return reason;
  const EvaluationMetrics metrics{output.progress.step, config_.train.steps, result->loss, result->samples};
  output.attempt([&] { output.metrics->write(metrics); });
  if (result->loss) {
    output.log.info(console_line(metrics));
  } else {
    output.log.warn(console_line(metrics));
  }
  return reason;
}

void Trainer::export_weights(const TrainState& state, Log& log) const {
  const std::filesystem::path folder = config_.checkpoint.export_dir;
  if (groups_.world->rank() == 0) claim_hf_folder(folder, kExportKey, export_owner(config_));
  state.await_values();
  export_hf_weights(state.parameters(), groups_, stream_, folder);
  if (groups_.world->rank() != 0) return;
  write_text_file(folder / "config.json", to_hf_config(config_.model, config_.numerics.precision));
  log.info(format("exported the weights to {}", folder.string()));
}

}  // namespace invar
