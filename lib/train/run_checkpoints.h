#pragma once

#include <memory>
#include <optional>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_saver.h"
#include "config/config_changes.h"
#include "observe/log.h"
#include "train/copy_check.h"
#include "train/run_contract.h"
#include "train/train_state.h"

namespace invar {

// How far a run has come.
struct Progress {
  int64_t step = 0;             // finished steps
  int64_t samples = 0;          // consumed
  int64_t tokens = 0;           // trained on
  int64_t skipped_steps = 0;    // of the finished ones
  bool evaluation_due = false;  // that after the last step was broken off
};

// The checkpoints of a run: which one it starts from, and those that it saves.
class RunCheckpoints {
 public:
  // Finds what checkpoint.resume means, opens it, and judges the config by it. Error{kData} if it cannot be used;
  // Error{kConfig} if the model, the precision or the contract of invariant numerics changed. Not collective.
  RunCheckpoints(const Config& config, const ProcessGroups& groups, const Stream& stream);

  bool resumes() const { return resumes_; }
  const std::filesystem::path& path() const { return path_; }  // of what the run resumes from; empty: the start
  // Where the checkpoint stands; the start if there is none.
  const Progress& start() const { return start_; }
  // Whether the run goes on in the folder that it saves to, so that its metrics go on too.
  bool continues_run() const { return continues_run_; }
  bool saves() const { return saver_ != nullptr; }

  // Error{kConfig} if the ranks' contracts differ, Error{kData} if they found different checkpoints. Collective over
  // the world, before anything else that is.
  void agree() const;
  // Masters and moments of the state, after which the files are closed. Collective over the world.
  void load(TrainState& state);
  // What a person should know of the resumption.
  void describe(Log& log) const;

  // Moves the checkpoints of an earlier run aside, unless this run goes on from them. Rank 0 calls it, before any save.
  void set_earlier_run_aside(Log& log) const;
  // From now on copies are compared before a save begins. What differs is thrown, on every rank, by the call that was
  // to save, and no checkpoint changes. `copies` must live until the last of these calls.
  void compare_before_saving(CopyCheck& copies) { copies_ = &copies; }

  // After a step: saves if it is due, or looks after the save in flight. A step that changed nothing, because its loss
  // was not finite, puts the save off: the weights may be to blame. Whether it began to save this step. Collective.
  bool after_step(const TrainState& state, const Progress& progress, bool changed_nothing, Log& log);
  // The last of the run: saves, unless this step is saved already, and waits. Not, with a warning, if several steps
  // before the end changed nothing and there is an earlier checkpoint. An Error{kFault}, on every rank, if it cannot be
  // written. Collective.
  std::optional<Error> finish(const TrainState& state, const Progress& progress, bool suspect, Log& log);
  // Waits for a save in flight. Collective.
  void wait(Log& log);
  // The same, and whether every rank then finds this step's as the latest, late though some may on shared file systems.
  // Collective.
  bool wait_until_saved(int64_t step, Log& log);

 private:
  CheckpointInfo info(const Progress& progress) const;
  void begin_save(const TrainState& state, const Progress& progress, Log& log);
  void report(const std::optional<SaveResult>& result, Log& log);

  const Config& config_;
  const ProcessGroups& groups_;
  std::optional<NumericsContract> contract_;
  std::unique_ptr<CheckpointReader> reader_;
  std::filesystem::path path_;  // of what the run resumes from
  Progress start_;
  std::string saved_layout_;
  std::vector<ConfigChange> changes_;
  bool resumes_ = false;
  bool other_reduction_ = false;  // fast, and the run that saved it invariant, or the other way about
  bool imported_ = false;         // weights alone, of no run
  bool continues_run_ = false;
  bool due_ = false;
  CopyCheck* copies_ = nullptr;
  std::unique_ptr<CheckpointSaver> saver_;
  std::optional<int64_t> saved_step_;  // the last one that is complete
  std::string last_failure_;           // why the last one that is not could not be written
};

}  // namespace invar
