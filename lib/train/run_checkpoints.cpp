#include "train/run_checkpoints.h"

#include "config/key_table.h"
#include "config/resolved.h"
#include "config/yaml_loader.h"

namespace invar {
namespace {

namespace fs = std::filesystem;

// The batch size as a number: what `auto` stands for depends on the layout.
Config with_batch_size(Config config, int world_size) {
  config.train.global_batch_size = global_batch_size(config, world_size);
  return config;
}

std::string describe_layout(const Config& config, const Topology& grid) {
  return format("tensor {}{} x data {}", grid.tensor,
                config.parallel.sequence && grid.tensor > 1 ? " with sequence parallelism" : "", grid.data);
}

std::optional<fs::path> checkpoint_to_resume(const Config& config) {
  const std::string& resume = config.checkpoint.resume;
  if (resume == "never") return std::nullopt;
  if (resume != "auto") return find_checkpoint(resume);
  const std::string dir = checkpoint_dir(config);
  return dir.empty() ? std::nullopt : RunDirectory(dir).latest();
}

}  // namespace

RunCheckpoints::RunCheckpoints(const Config& config, const ProcessGroups& groups, const Stream& stream)
    : config_(config), groups_(groups), stream_(stream) {
  const std::string dir = checkpoint_dir(config);
  if (const auto path = checkpoint_to_resume(config)) {
    const bool checks = groups.world->rank() == 0;
    reader_ = std::make_unique<CheckpointReader>(
        *path, checks ? CheckpointReader::Shards::kCheck : CheckpointReader::Shards::kTrust);
    Config saved = load_config_text(reader_->info().config, path->string());
    imported_ = saved.train.steps == 0;
    if (imported_) saved.numerics = config.numerics;  // fp32 weights suit any
    changes_ = config_changes(saved, with_batch_size(config, groups.world->size()));
    continues_run_ = !dir.empty() && fs::weakly_canonical(path->parent_path()) == fs::weakly_canonical(dir);
  }
  if (dir.empty()) return;
  CheckpointSaver::Options options;
  options.async = config.checkpoint.async;
  options.keep = config.checkpoint.keep;
  options.keep_every = config.checkpoint.keep_every;
  saver_ = std::make_unique<CheckpointSaver>(*groups.world, stream, dir, options);
  if (continues_run_) saved_step_ = reader_->info().step;
}

Progress RunCheckpoints::load(TrainState& state) {
  const CheckpointInfo& info = reader_->info();
  const auto differs = [&](ReduceOp op) { return all_reduce_value(*groups_.world, info.step, op) != info.step; };
  if (differs(ReduceOp::kMin) || differs(ReduceOp::kMax)) {
    throw Error(ErrorKind::kData, format("{}: not the same on all ranks", reader_->folder().string()),
                "checkpoint.dir must lie on a file system that all hosts share");
  }
  state.load(*reader_);
  return {info.step, info.samples, info.tokens, info.skipped_steps};
}

void RunCheckpoints::describe(Log& log) const {
  if (!resumes()) return;
  const CheckpointInfo& info = reader_->info();
  if (imported_) return log.info(format("weights of {}, fresh moments", reader_->folder().string()));
  log.info(format("resumed from {}: step {} of {}, {} samples consumed, saved at {}{}", reader_->folder().string(),
                  info.step, config_.train.steps, info.samples, info.layout,
                  reader_->has_moments() ? "" : ", without moments: they start at zero"));
  for (const ConfigChange& change : changes_) {
    log.info(format("  {}: {} -> {}", change.key, change.before, change.after));
    const bool moves_data = change.key == "train.steps" || change.key == "train.global_batch_size";
    if (moves_data && config_.data.kind == DataKind::kMegatron) {
      log.warn(
          "data.kind: megatron lays its samples out over the whole run: a run of another length may order them "
          "differently");
    }
  }
}

CheckpointInfo RunCheckpoints::info(const Progress& progress) const {
  CheckpointInfo info;
  info.step = progress.step;
  info.samples = progress.samples;
  info.tokens = progress.tokens;
  info.skipped_steps = progress.skipped_steps;
  info.config = to_portable_yaml(with_batch_size(config_, groups_.world->size()));
  info.layout = describe_layout(config_, groups_.topology);
  return info;
}

void RunCheckpoints::begin_save(const TrainState& state, const Progress& progress, Log& log) {
  report(saver_->save(info(progress), state.own_part(TrainState::Copies::kOne)), log);
  if (!config_.checkpoint.async) wait(log);
}

void RunCheckpoints::after_step(const TrainState& state, const Progress& progress, Log& log) {
  if (!saves()) return;
  const int64_t every = config_.checkpoint.every;
  if (every > 0 && progress.step % every == 0) return begin_save(state, progress, log);
  report(saver_->poll(), log);
}

void RunCheckpoints::finish(const TrainState& state, const Progress& progress, Log& log) {
  if (!saves()) return;
  wait(log);
  if (saved_step_ == progress.step) return;
  begin_save(state, progress, log);
  wait(log);
  if (saved_step_ == progress.step) return;
  throw Error(ErrorKind::kFault, format("the last checkpoint, of step {}, could not be written", progress.step),
              saved_step_ ? format("the run can go on from step {}", *saved_step_) : "none was written");
}

void RunCheckpoints::wait(Log& log) {
  if (saves()) report(saver_->wait(), log);
}

void RunCheckpoints::report(const std::optional<SaveResult>& result, Log& log) {
  if (!result) return;
  if (result->failure.empty()) {
    saved_step_ = result->step;
    log.info(format("saved step {}: {:.1f} MiB in {:.1f} s", result->step,
                    static_cast<double>(result->bytes) / (1 << 20), result->seconds));
    return;
  }
  const std::string message =
      format("the checkpoint of step {} could not be written: {}", result->step, result->failure);
  if (config_.checkpoint.on_error == SaveFailurePolicy::kStop) {
    throw Error(ErrorKind::kFault, message, "checkpoint.on_error: continue would go on training");
  }
  if (groups_.world->rank() == 0) log.warn(message + "; training goes on");
}

}  // namespace invar
