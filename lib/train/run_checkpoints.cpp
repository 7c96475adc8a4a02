#include "train/run_checkpoints.h"

#include <chrono>
#include <thread>

#include "config/key_table.h"
#include "config/resolved.h"
#include "config/yaml_loader.h"

namespace invar {
namespace {

namespace fs = std::filesystem;

// Hosts may remember for so long what was in a shared folder.
constexpr std::chrono::seconds kUntilSeen(60);

// The batch size as a number: what `auto` stands for depends on the layout.
Config with_batch_size(Config config, int world_size) {
  config.train.global_batch_size = global_batch_size(config, world_size);
  return config;
}

// Whether a path, with or without a slash at its end, is a checkpoint of this folder, there or not.
bool lies_in(const fs::path& path, const std::string& dir) {
  if (dir.empty()) return false;
  const fs::path checkpoint = fs::weakly_canonical(path / ".");
  return checkpoint.parent_path() == fs::weakly_canonical(fs::path(dir) / ".");
}

// Once a run has checkpoints of its own, it goes on from them, however it began: the same command must lead on.
std::optional<fs::path> checkpoint_to_resume(const Config& config) {
  const std::string& resume = config.checkpoint.resume;
  if (resume == "never") return std::nullopt;
  const std::string dir = checkpoint_dir(config);
  std::optional<fs::path> own = dir.empty() ? std::nullopt : RunDirectory(dir).latest();
  if (resume == "auto") return own;
  if (own && !lies_in(resume, dir)) return own;
  return find_checkpoint(resume);
}

bool is_latest(const RunDirectory& own, int64_t step) {
  try {
    return own.latest() == own.path_of(step);
  } catch (const Error&) {  // it names one that is not there yet
    return false;
  }
}

}  // namespace

RunCheckpoints::RunCheckpoints(const Config& config, const ProcessGroups& groups, const Stream& stream)
    : config_(config), groups_(groups), contract_(run_contract(config, stream)) {
  const std::string dir = checkpoint_dir(config);
  if (const auto path = checkpoint_to_resume(config)) {
    resumes_ = true;
    path_ = *path;
    const bool checks = groups.world->rank() == 0;
    reader_ = std::make_unique<CheckpointReader>(
        path_, checks ? CheckpointReader::Shards::kCheck : CheckpointReader::Shards::kTrust);
    const CheckpointInfo& info = reader_->info();
    start_ = {info.step, info.samples, info.tokens, info.skipped_steps, info.evaluation_due};
    saved_layout_ = info.layout;
    imported_ = !reader_->has_moments();
    Config saved = load_config_text(info.config, "config of " + path_.string());
    if (imported_) saved.numerics = config.numerics;  // fp32 weights suit any
    changes_ = config_changes(saved, with_batch_size(config, groups.world->size()));
    check_contract(saved, info.contract, config, contract_ ? contract_->text() : "");
    other_reduction_ = saved.numerics.reduction != config.numerics.reduction;
    continues_run_ = lies_in(path_, dir);
  }
  if (dir.empty()) return;
  CheckpointSaver::Options options;
  options.async = config.checkpoint.async;
  options.keep = config.checkpoint.keep;
  options.keep_every = config.checkpoint.keep_every;
  saver_ = std::make_unique<CheckpointSaver>(*groups.world, stream, dir, options);
  if (continues_run_) saved_step_ = start_.step;
}

void RunCheckpoints::agree() const {
  agree_on_contract(contract_, *groups_.world);
  const int64_t mine = resumes_ ? start_.step : -1;
  const int64_t least = all_reduce_value(*groups_.world, mine, ReduceOp::kMin);
  const int64_t most = all_reduce_value(*groups_.world, mine, ReduceOp::kMax);
  if (least == most) return;
  const std::string found = resumes_ ? path_.string() : "no checkpoint";
  throw Error(ErrorKind::kData, format("this rank found {} to resume from, others found something else", found),
              "checkpoint.dir must lie on a file system that all hosts share, and all ranks need the same arguments");
}

void RunCheckpoints::set_earlier_run_aside(Log& log) const {
  if (!saves() || continues_run_) return;
  const CleanUp clean_up = RunDirectory(checkpoint_dir(config_)).set_aside();
  if (!clean_up.done.empty()) log.info("old checkpoints: " + clean_up.done);
  if (!clean_up.problems.empty()) log.warn("old checkpoints: " + clean_up.problems);
}

void RunCheckpoints::load(TrainState& state) {
  state.load(*reader_);
  reader_.reset();
}

void RunCheckpoints::describe(Log& log) const {
  if (!resumes()) return;
  if (imported_) return log.info(format("weights of {}, fresh moments", path_.string()));
  log.info(format("resumed from {}: step {} of {}, {} samples consumed, saved at {}", path_.string(), start_.step,
                  config_.train.steps, start_.samples, saved_layout_));
  const std::string& resume = config_.checkpoint.resume;
  if (groups_.world->rank() != 0) return;
  if (resume != "auto" && continues_run_) {
    const bool goes_back = lies_in(resume, checkpoint_dir(config_));
    log.warn(goes_back ? "checkpoint.resume names a checkpoint of this run: started again so, it goes back there again"
                       : format("checkpoint.resume = {} was for the start; this run goes on from its own", resume));
  }
  if (other_reduction_) {
    log.warn(format("saved with other numerics: from here on the bits are those of numerics.reduction: {}",
                    word_of(config_.numerics.reduction)));
  }
  bool data_moves = false;
  for (const ConfigChange& change : changes_) {
    log.info(format("  {}: {} -> {}", change.key, change.before, change.after));
    const bool of_length = change.key == "train.steps" || change.key == "train.global_batch_size";
    data_moves = data_moves || change.key == "train.seed" || change.key == "train.sequence_length" ||
                 change.key.starts_with("data.") || (of_length && config_.data.kind == DataKind::kMegatron);
  }
  if (data_moves) {
    log.warn(format("other data or another order of it: training goes on at sample {} of the new one", start_.samples));
  }
}

CheckpointInfo RunCheckpoints::info(const Progress& progress) const {
  CheckpointInfo info;
  info.step = progress.step;
  info.samples = progress.samples;
  info.tokens = progress.tokens;
  info.skipped_steps = progress.skipped_steps;
  info.evaluation_due = progress.evaluation_due;
  info.config = to_portable_yaml(with_batch_size(config_, groups_.world->size()));
  info.layout = groups_.topology.describe(config_.parallel.sequence);
  if (contract_) info.contract = contract_->text();
  if (contract_) info.contract_hash = contract_->hash();
  return info;
}

void RunCheckpoints::begin_save(const TrainState& state, const Progress& progress, Log& log) {
  wait(log);  // the last one's copy of the state goes before there is another
  try {
    if (copies_ != nullptr) copies_->check(progress.step);
  } catch (const Error& error) {
    throw error.in(format("no checkpoint of step {} is written", progress.step));
  }
  report(saver_->save(info(progress), [&] { return state.own_part(); }), log);
  if (!config_.checkpoint.async) wait(log);
}

bool RunCheckpoints::after_step(const TrainState& state, const Progress& progress, bool changed_nothing, Log& log) {
  if (!saves()) return false;
  const int64_t every = config_.checkpoint.every;
  due_ = due_ || (every > 0 && progress.step % every == 0);
  if (!due_ || changed_nothing) {
    report(saver_->poll(), log);
    return false;
  }
  due_ = false;
  begin_save(state, progress, log);
  return true;
}

std::optional<Error> RunCheckpoints::finish(const TrainState& state, const Progress& progress, bool suspect, Log& log) {
  if (!saves()) return std::nullopt;
  wait(log);
  if (saved_step_ == progress.step) return std::nullopt;
  const std::string before = saved_step_ ? format("the run can go on from step {}", *saved_step_) : "none was written";
  if (suspect && saved_step_) {
    if (groups_.world->rank() == 0) {
      log.warn(format("no checkpoint of step {}: the last steps changed nothing, and the weights may be to blame; {}",
                      progress.step, before));
    }
    return std::nullopt;
  }
  begin_save(state, progress, log);
  wait(log);
  if (saved_step_ == progress.step) return std::nullopt;
  return Error(ErrorKind::kFault,
               format("the last checkpoint, of step {}, could not be written: {}", progress.step, last_failure_),
               before);
}

void RunCheckpoints::wait(Log& log) {
  if (saves()) report(saver_->wait(), log);
}

bool RunCheckpoints::wait_until_saved(int64_t step, Log& log) {
  wait(log);
  if (saved_step_ != step) return false;
  const auto deadline = std::chrono::steady_clock::now() + kUntilSeen;
  const RunDirectory own(checkpoint_dir(config_));
  bool seen = is_latest(own, step);
  while (!seen && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    seen = is_latest(own, step);
  }
  return all_reduce_value(*groups_.world, int64_t{seen}, ReduceOp::kMin) == 1;
}

void RunCheckpoints::report(const std::optional<SaveResult>& result, Log& log) {
  if (!result) return;
  if (!result->clean_up.done.empty()) log.info("old checkpoints: " + result->clean_up.done);
  if (!result->clean_up.problems.empty()) log.warn("old checkpoints: " + result->clean_up.problems);
  if (result->failure.empty()) {
    saved_step_ = result->step;
    log.info(format("saved step {}: {:.1f} MiB in {:.1f} s", result->step,
                    static_cast<double>(result->bytes) / (1 << 20), result->seconds));
    return;
  }
  last_failure_ = result->failure;
  const std::string message =
      format("the checkpoint of step {} could not be written: {}", result->step, result->failure);
  if (config_.checkpoint.on_error == SaveFailurePolicy::kStop) {
    throw Error(ErrorKind::kFault, message, "checkpoint.on_error: continue would go on training");
  }
  if (groups_.world->rank() == 0) log.warn(message + "; training goes on");
}

}  // namespace invar
