#include <filesystem>
#include <optional>

#include "app/commands.h"
#include "app/rank_device.h"
#include "app/training_ranks.h"
#include "checkpoint/run_directory.h"
#include "comm/fake_communicator.h"
#include "config/resolved.h"
#include "config/units.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "core/presence.h"
#include "data/document_end.h"
#include "parallel/leaf_cut.h"
#include "train/trainer.h"

namespace invar::app {
namespace {

void refuse_results(const Config& config) {
  if (config.parallel.nonuniform.reshare) {
    throw Error(ErrorKind::kConfig, "--fake-world: a rank without peers has no speed to share the batch by",
                "set parallel.nonuniform.reshare: false");
  }
  const std::string& resume = config.checkpoint.resume;
  const bool resumes = resume != "auto" && resume != "never";
  if (!checkpoint_dir(config).empty() || !config.checkpoint.export_dir.empty() || resumes) {
    throw Error(ErrorKind::kConfig, "--fake-world: a rank without peers trains nothing that could be saved or resumed",
                "set checkpoint.every: 0 and no checkpoint.dir, checkpoint.resume or checkpoint.export_dir");
  }
  if (config.log.dump_step > 0 || config.log.hash_every > 0) {
    throw Error(ErrorKind::kConfig, "--fake-world: the state of a rank without peers is nobody's to compare",
                "set log.dump_step: 0 and log.hash_every: 0");
  }
  const std::filesystem::path metrics = std::filesystem::path(config.log.dir) / "metrics.jsonl";
  if (!config.log.dir.empty() && is_there(metrics, "set log.dir to another folder", ErrorKind::kConfig)) {
    throw Error(ErrorKind::kConfig,
                format("--fake-world would put its metrics in place of {}, of another run", metrics.string()),
                "set log.dir to another folder");
  }
}

// Of its checkpoints and its log; one rank of a run takes them.
std::vector<FolderLock> lock_folders(const Config& config) {
  std::vector<FolderLock> locks;
  const auto take = [&](const char* key, const auto& lock) {
    try {
      locks.push_back(lock());
    } catch (const Error& error) {
      throw error.in(key);
    }
  };
  if (!config.log.dir.empty()) {
    take("log.dir", [&] {
      return lock_folder(config.log.dir, "another run writes its log and metrics here",
                         "end the other one, or give this one a log.dir of its own");
    });
  }
  const std::string checkpoints = checkpoint_dir(config);
  std::error_code differ;
  if (checkpoints.empty() || std::filesystem::equivalent(config.log.dir, checkpoints, differ)) return locks;
  take("checkpoint.dir", [&] { return RunDirectory(checkpoints).lock(); });
  return locks;
}

// Rank 0 has no embeddings of tokens of other ranks, and zeros in their place would make gradients overflow.
void use_tokens_of_rank_0(Config& config, const ReplicaPlan& plan) {
  if (config.data.kind != DataKind::kMock) {
    throw Error(ErrorKind::kConfig,
                "--fake-world: a rank without peers has embeddings of its own part of the tokens only",
                "set data.kind: mock");
  }
  if (config.data.mock_vocab_size != 0) return;
  const int64_t leaves = config.numerics.reduction == Reduction::kInvariant ? config.numerics.leaves : 0;
  const Range units = unit_runs(vocab_units(config.model.vocab_size), leaves, plan.widths.front()).front();
  config.data.mock_vocab_size = std::min(config.model.vocab_size, units.size() * kVocabUnit);
}

// Rank 0 of a job whose other ranks do not exist.
int train_alone(const TrainArguments& arguments, MpiSession& session) {
  heed_stop_signals();
  if (session.world().size() != 1) {
    throw Error(ErrorKind::kConfig, format("--fake-world under a launcher, with {} ranks", session.world().size()),
                "start it without mpirun or srun");
  }
  Config config = load_config(arguments.config, arguments.overrides);
  refuse_results(config);
  validate(config, arguments.fake_world);
  settle_eod_id(config);
  const ReplicaPlan plan = plan_replicas(config, arguments.fake_world, {});
  use_tokens_of_rank_0(config, plan);
  if (!is_whole_grid(config, plan)) {
    config.train.global_batch_size = plan.batch();
    config.parallel.nonuniform.batch = BatchPolicy::kKeep;
  }
  const RankDevice device = open_device(config, session, session.world());
  const std::vector<FolderLock> locks = lock_folders(config);
  const Topology topology = topology_of(plan);
  const std::unique_ptr<Communicator> world = make_fake_communicator(0, topology.world(), "world");
  const ProcessGroups groups = make_process_groups(*world, topology, GroupMaker(make_fake_communicator));
  Log log(0, config.log.dir);
  log.warn(format("rank 0 of {} alone: losses mean nothing, and of communication there are local copies only",
                  topology.world()));
  for (const std::string& remark : plan_remarks(config, plan)) log.info(remark);
  StopControl stop(config.train, nullptr);
  Trainer(config, groups, device.stream, stop).run(log);
  return 0;
}

// With the shares of the batch that the ranks have planned, until the run ends or they should be others.
Ending train_by_plan(const Config& config, TrainingRanks& ranks, const RankDevice& device, StopControl& stop,
                     ReplicaWork* work, Log& log) {
  const ProcessGroups groups = make_process_groups(*device.world, topology_of(ranks.plan()));
  std::unique_ptr<Trainer> trainer;
  together(ranks.world(), [&] {
    if (ranks.world().rank() == 0) {
      for (const std::string& remark : ranks.remarks()) log.warn(remark);
    }
    trainer = std::make_unique<Trainer>(config, groups, device.stream, stop, work);
  });
  try {
    return trainer->run(log);
  } catch (...) {
    // It would wait for what is being written, and the other ranks for this one. The process ends soon.
    (void)trainer.release();
    throw;
  }
}

// Of the ranks that compute. config: as planned; given: before.
Ending train_together(Config& config, Config given, TrainingRanks& ranks, MpiSession& session,
                      std::span<const HostSlot> hosts) {
  Communicator& world = ranks.world();
  std::vector<FolderLock> locks;  // before anybody looks for the latest checkpoint or writes
  together(world, [&] {
    choose_device(config);
    if (world.rank() == 0) locks = lock_folders(config);
  });
  const RankDevice device = open_device(config, session, world);
  StopControl stop(config.train, checkpoint_dir(config).empty() ? nullptr : catch_stop_signals());
  std::optional<Log> log;
  together(world, [&] { log.emplace(world.rank(), config.log.dir, session.world().rank()); });
  const std::string crowd =
      too_many_threads(device.stream.threads(), session.local_size(), usable_cores(session.local_cores()));
  if (session.local_rank() == 0 && !crowd.empty()) log->warn(crowd);
  if (world.rank() == 0 && device.shares_gpus) {
    log->warn("ranks share GPUs: NCCL moves everything as between hosts, and steps are slow");
  }
  const bool reshares = given.parallel.nonuniform.reshare && ranks.plan().widths.size() > 1;
  std::optional<ReplicaWork> work;
  if (reshares || !ranks.plan().uniform()) work.emplace(given, ranks.plan());
  try {
    for (;;) {
      const Ending ending = train_by_plan(config, ranks, device, stop, work ? &*work : nullptr, *log);
      if (ending != Ending::kReshare) {
        world.barrier();
        return ending;
      }
      given.parallel.nonuniform.speeds = work->speeds()->speeds;
      given.checkpoint.resume = "auto";  // the one that was just saved, wherever the run began
      config = given;
      together(world, [&] { ranks.share_anew(config, hosts); });
      work->start_anew(given, ranks.plan());
    }
  } catch (...) {
    (void)new std::vector<FolderLock>(std::move(locks));  // until the process ends, which writes on
    throw;
  }
}

}  // namespace

int train(const TrainArguments& arguments, MpiSession& session) {
  if (arguments.fake_world > 0) return train_alone(arguments, session);
  const std::vector<HostSlot> hosts = gather_hosts(session);
  Config config;
  together(session.world(), [&] {
    config = load_config(arguments.config, arguments.overrides);
    validate(config, session.world().size(), hosts);
    settle_eod_id(config);
  });
  if (checkpoint_dir(config).empty()) heed_stop_signals();
  const Config given = config;
  std::optional<TrainingRanks> ranks;
  together(session.world(), [&] { ranks.emplace(config, session, hosts); });  // which all refuse if one does
  if (ranks->idle()) {
    catch_stop_signals();  // of a launcher that passes them on to every rank
    return ranks->wait_for_the_others(session);
  }
  Ending ending{};
  try {
    ending = train_together(config, given, *ranks, session, hosts);
  } catch (const SetupError&) {  // on all of them, and the idle ones would sleep on
    ranks->wait_for_the_others(session);
    throw;
  } catch (const ReportedElsewhere&) {
    ranks->wait_for_the_others(session);
    throw;
  }
  ranks->wait_for_the_others(session);
  return ending == Ending::kStopped ? kRestartMe : 0;
}

}  // namespace invar::app
