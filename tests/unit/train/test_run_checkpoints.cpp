#include "train/run_checkpoints.h"

#include "comm/thread_communicator.h"
#include "config/presets.h"
#include "small_model.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;
namespace fs = std::filesystem;

namespace {

Config small_run(const fs::path& dir) {
  Config config = small_model(1);
  config.train.steps = 100;
  config.checkpoint.dir = dir.string();
  config.checkpoint.every = 10;
  return config;
}

// body(checkpoints, state, log) on two ranks of a run.
using Body = std::function<void(RunCheckpoints&, TrainState&, Log&)>;
void on_ranks(const Config& config, const Body& body) {
  run_thread_ranks(2, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {2, 1});
    const Stream stream(DeviceType::kCpu);
    RunCheckpoints checkpoints(config, groups, stream);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()));
    initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
    state.adopt_values();
    Log log(world.rank(), config.log.dir);
    body(checkpoints, state, log);
  });
}

void save_steps(const Config& config, const std::vector<int64_t>& steps) {
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState& state, Log& log) {
    for (const int64_t step : steps) checkpoints.after_step(state, {step, step * 4, step * 32, 0, false}, false, log);
    checkpoints.wait(log);
  });
}

std::string read_log(const TemporaryFolder& folder) {
  return folder.read("run/log.txt");
}

}  // namespace

TEST_CASE("Steps that are due are saved, and a run finds where the last one stood") {
  const TemporaryFolder folder;
  Config config = small_run(folder / "c");
  config.checkpoint.keep = 2;
  save_steps(config, {9, 10, 11, 20, 30});
  CHECK(RunDirectory(folder / "c").steps() == std::vector<int64_t>{20, 30});
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState& state, Log&) {
    const bool resumes = checkpoints.resumes() && checkpoints.continues_run();
    checkpoints.agree();
    checkpoints.load(state);
    const Progress progress = checkpoints.start();
    CHECK(resumes);
    CHECK(progress.step == 30);
    CHECK(progress.samples == 120);
    CHECK(progress.tokens == 960);
  });
  config.checkpoint.resume = "never";
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState&, Log&) { CHECK(!checkpoints.resumes()); });
  config.checkpoint.resume = (folder / "c/step_00000020").string();
  config.checkpoint.dir = (folder / "other").string();
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState& state, Log&) {
    checkpoints.load(state);
    const Progress progress = checkpoints.start();
    CHECK(progress.step == 20);
    CHECK(!checkpoints.continues_run());
  });
}

TEST_CASE("A run that began from another's checkpoint goes on from its own once it has some") {
  const TemporaryFolder folder;
  Config config = small_run(folder / "a");
  save_steps(config, {10, 20});
  config.checkpoint.resume = (folder / "a/step_00000010").string() + "/";
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState&, Log&) {  // back within the run
    CHECK(checkpoints.start().step == 10);
    CHECK(checkpoints.continues_run());
  });
  config.checkpoint.dir = (folder / "b").string();
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState& state, Log& log) {
    CHECK(checkpoints.start().step == 10);
    CHECK(!checkpoints.continues_run());
    checkpoints.after_step(state, {30, 0, 0, 0, false}, false, log);
    checkpoints.wait(log);
  });
  fs::remove_all(folder / "a");  // no longer needed
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState&, Log&) {
    CHECK(checkpoints.start().step == 30);
    CHECK(checkpoints.continues_run());
  });
}

TEST_CASE("Ranks that found different checkpoints say so instead of waiting for each other") {
  const TemporaryFolder folder;
  Config config = small_run(folder / "c");
  save_steps(config, {10});
  run_thread_ranks(2, [&](Communicator& world) {
    Config mine = config;
    if (world.rank() == 1) mine.checkpoint.resume = "never";
    const ProcessGroups groups = make_process_groups(world, {2, 1});
    const Stream stream(DeviceType::kCpu);
    const RunCheckpoints checkpoints(mine, groups, stream);
    const std::optional<Error> error = error_of([&] { checkpoints.agree(); });
    CHECK(error.has_value());
    CHECK(error->kind() == ErrorKind::kData);
  });
}

TEST_CASE("After a step that changed nothing the save waits for one that did") {
  const TemporaryFolder folder;
  on_ranks(small_run(folder / "c"), [&](RunCheckpoints& checkpoints, TrainState& state, Log& log) {
    std::vector<bool> saves;
    saves.push_back(checkpoints.after_step(state, {10, 0, 0, 1, false}, true, log));
    saves.push_back(checkpoints.after_step(state, {11, 0, 0, 2, false}, true, log));
    saves.push_back(checkpoints.after_step(state, {12, 0, 0, 2, false}, false, log));
    saves.push_back(checkpoints.after_step(state, {13, 0, 0, 2, false}, false, log));
    const bool of_12 = checkpoints.wait_until_saved(12, log), of_13 = checkpoints.wait_until_saved(13, log);
    CHECK(saves == std::vector<bool>{false, false, true, false});
    CHECK(of_12);
    CHECK(!of_13);
  });
  CHECK(RunDirectory(folder / "c").steps() == std::vector<int64_t>{12});
}

TEST_CASE("The last save is not repeated, and must succeed") {
  const TemporaryFolder folder;
  const Config config = small_run(folder / "c");
  on_ranks(config, [&](RunCheckpoints& checkpoints, TrainState& state, Log& log) {
    checkpoints.after_step(state, {10, 0, 0, 0, false}, false, log);
    const bool again = checkpoints.finish(state, {10, 0, 0, 0, false}, false, log).has_value();
    const bool later = checkpoints.finish(state, {13, 0, 0, 0, true}, false, log).has_value();
    const bool suspect = checkpoints.finish(state, {15, 0, 0, 2, false}, true, log).has_value();
    CHECK(!again);
    CHECK(!later);
    CHECK(!suspect);
  });
  CHECK(RunDirectory(folder / "c").steps() == std::vector<int64_t>{10, 13});
}

TEST_CASE("A save that fails leaves the last checkpoint; the run goes on or ends, as the config says") {
  for (const bool async : {true, false}) {
    const TemporaryFolder folder;
    Config config = small_run(folder / "c");
    config.checkpoint.async = async;
    config.log.dir = (folder / "run").string();
    save_steps(config, {10, 20});
    // The folder goes, and a file takes its place.
    fs::rename(folder / "c", folder / "aside");
    folder.write("c", "a file");
    Config blocked = config;
    blocked.checkpoint.resume = "never";
    on_ranks(blocked, [](RunCheckpoints& checkpoints, TrainState& state, Log& log) {
      checkpoints.after_step(state, {30, 120, 960, 0, false}, false, log);
      const bool saved = checkpoints.wait_until_saved(30, log);
      CHECK(!saved);
    });
    CHECK(contains(read_log(folder), "the checkpoint of step 30 could not be written"));
    CHECK(contains(read_log(folder), "training goes on"));
    blocked.checkpoint.on_error = SaveFailurePolicy::kStop;
    require_error(ErrorKind::kFault, {"the checkpoint of step 40 could not be written"},
                  [&] { save_steps(blocked, {40}); });
    fs::remove(folder / "c");
    fs::rename(folder / "aside", folder / "c");
    CHECK(RunDirectory(folder / "c").latest() == RunDirectory(folder / "c").path_of(20));
    save_steps(config, {30});
    CHECK(RunDirectory(folder / "c").latest() == RunDirectory(folder / "c").path_of(30));
  }
}

TEST_CASE("Another model or other numerics are refused with both values; another recipe is told") {
  const TemporaryFolder folder;
  Config config = small_run(folder / "c");
  config.log.dir = (folder / "run").string();
  save_steps(config, {10});
  const auto refuses = [&](const std::vector<std::string>& texts, const std::function<void(Config&)>& change) {
    Config changed = config;
    change(changed);
    require_error(ErrorKind::kConfig, texts, [&] { save_steps(changed, {}); });
  };
  refuses({"model.hidden_size is 64", "saved with 32"}, [](Config& c) { c.model.hidden_size = 64; });
  refuses({"model.tie_word_embeddings is true", "saved with false"},
          [](Config& c) { c.model.tie_word_embeddings = true; });
  refuses({"numerics.precision is bf16", "saved with fp32"},
          [](Config& c) { c.numerics.precision = Precision::kBF16; });
  Config changed = config;
  changed.optimizer.lr = 1e-5;
  changed.train.steps = 200;
  changed.train.global_batch_size = 8;
  changed.train.seed = 5;
  changed.train.recompute = RecomputeKind::kFull;  // of no consequence
  on_ranks(changed, [&](RunCheckpoints& checkpoints, TrainState&, Log& log) { checkpoints.describe(log); });
  const std::string log = read_log(folder);
  CHECK(contains(log, "optimizer.lr: 0.0003 -> 1e-05"));
  CHECK(contains(log, "train.steps: 100 -> 200"));
  CHECK(contains(log, "goes on at sample 40 of the new one"));
  CHECK(contains(log, "train.global_batch_size: 1 -> 8"));
  CHECK(!contains(log, "train.recompute: none -> "));
}

namespace {

Config invariant_run(const fs::path& dir) {
  Config config = small_run(dir);
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 1;  // its batches have one sample
  return config;
}

}  // namespace

TEST_CASE("A checkpoint of an invariant run has its contract, and another contract is refused") {
  const TemporaryFolder folder;
  Config config = invariant_run(folder / "c");
  save_steps(config, {10});
  const NumericsContract contract = numerics_contract(config, "fma-chain");
  const CheckpointReader reader(folder / "c/step_00000010");
  CHECK(reader.info().contract == contract.text());
  CHECK(reader.info().contract_hash == contract.hash());

  on_ranks(config, [](RunCheckpoints& checkpoints, TrainState&, Log&) { CHECK(checkpoints.start().step == 10); });
  config.numerics.workers = 4;
  run_thread_ranks(2, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {2, 1});
    const Stream stream(DeviceType::kCpu);
    const std::optional<Error> error = error_of([&] { const RunCheckpoints checkpoints(config, groups, stream); });
    CHECK(error.has_value());
    CHECK(error->kind() == ErrorKind::kConfig);
  });
}

TEST_CASE("A run may go on with other reductions, and a person is told") {
  const TemporaryFolder folder;
  const auto warned_after = [&](const Config& before, Config now, const std::string& dir) {
    save_steps(before, {10});
    now.log.dir = (folder / dir).string();
    on_ranks(now, [](RunCheckpoints& checkpoints, TrainState&, Log& log) {
      CHECK(checkpoints.start().step == 10);
      checkpoints.describe(log);
    });
    return folder.read(dir + "/log.txt").find("from here on the bits are those of numerics.reduction: ") !=
           std::string::npos;
  };
  const bool to_invariant = warned_after(small_run(folder / "a"), invariant_run(folder / "a"), "fast_to_invariant");
  const bool to_fast = warned_after(invariant_run(folder / "b"), small_run(folder / "b"), "invariant_to_fast");
  const bool fast = warned_after(small_run(folder / "d"), small_run(folder / "d"), "fast");
  const bool invariant = warned_after(invariant_run(folder / "e"), invariant_run(folder / "e"), "invariant");
  CHECK(to_invariant);
  CHECK(to_fast);
  CHECK(!fast);
  CHECK(!invariant);
  CHECK(CheckpointReader(folder / "a/step_00000010").info().contract.empty());
}

TEST_CASE("Ranks with different contracts do not start together") {
  run_thread_ranks(2, [](Communicator& world) {
    const Config config = invariant_run("c");
    agree_on_contract(std::nullopt, world);
    agree_on_contract(numerics_contract(config, "mma-k16-sm90", "cudnn-9.19.0"), world);
    const auto refused = [&](const std::string& arithmetic, const std::string& attention, const std::string& named) {
      const std::optional<Error> error =
          error_of([&] { agree_on_contract(numerics_contract(config, arithmetic, attention), world); });
      CHECK(error.has_value());
      CHECK(contains(error->what(), named));
    };
    const bool first = world.rank() == 0;
    const std::string arithmetic = first ? "mma-k16-sm90" : "mma-k16-sm80";
    refused(arithmetic, "own", arithmetic);
    const std::string attention = first ? "cudnn-9.19.0" : "cudnn-9.20.0";
    refused("mma-k16-sm90", attention, "its attention " + attention);
    refused("mma-k16-sm90", first ? "own" : attention, "mma-k16-sm90");
  });
}

TEST_CASE("The contract of a run on GPUs names cuDNN where a layer may take its attention") {
  Config config = invariant_run("c");
  config.train.sequence_length = 1024;
  config.model.head_dim = 64;
  config.numerics.precision = Precision::kBF16;
  const std::string version = "9.19.0";
  CHECK(attention_of(config, version) == "cudnn-9.19.0");
  CHECK(attention_of(config, "") == "own");
  const auto own = [&](const std::function<void(Config&)>& change) {
    Config changed = config;
    change(changed);
    return attention_of(changed, version) == "own";
  };
  CHECK(own([](Config& c) { c.numerics.precision = Precision::kF32; }));
  CHECK(own([](Config& c) { c.data.reset_at_eod = true; }));
  CHECK(own([](Config& c) { c.model.head_dim = 288; }));

  config.model = preset_model("gemma4-e2b");  // full layers of head_dim 512 and windows of 512
  CHECK(attention_of(config, version) == "cudnn-9.19.0");
  CHECK(own([](Config& c) { c.train.sequence_length = 4096; }));

  CHECK(run_contract(config, DeviceType::kCpu, 0)->attention.empty());
}
