#include <optional>

#include "app/commands.h"
#include "app/rank_device.h"
#include "app/training_ranks.h"
#include "checkpoint/run_directory.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "train/trainer.h"

namespace invar::app {

int train(const TrainArguments& arguments, MpiSession& session) {
  const std::vector<HostSlot> hosts = gather_hosts(session);
  Config config;
  together(session.world(), [&] {
    config = load_config(arguments.config, arguments.overrides);
    validate(config, session.world().size(), hosts);
  });
  const Config given = config;
  TrainingRanks ranks(config, session, hosts);
  if (ranks.idle()) {
    catch_stop_signals();  // of a launcher that passes them on to every rank
    return ranks.wait_for_the_others(session);
  }
  Communicator& world = ranks.world();
  RunDirectory::Lock lock;  // before anybody looks for the latest checkpoint
  together(world, [&] {
    choose_device(config);
    const std::string dir = checkpoint_dir(config);
    if (world.rank() == 0 && !dir.empty()) lock = RunDirectory(dir).lock();
  });
  const Topology topology = ranks.topology();
  const RankDevice device = open_device(config, session, world);
  const ProcessGroups groups = make_process_groups(*device.world, topology);

  const volatile std::sig_atomic_t* signal = checkpoint_dir(config).empty() ? nullptr : catch_stop_signals();
  std::unique_ptr<ReplicaWork> work;
  if (!topology.uniform()) work = std::make_unique<ReplicaWork>(given, ranks.plan());
  std::unique_ptr<Trainer> trainer;
  std::optional<Log> log;
  together(world, [&] {
    log.emplace(world.rank(), config.log.dir);
    if (world.rank() == 0) {
      for (const std::string& remark : ranks.remarks()) log->warn(remark);
      if (device.shares_gpus) log->warn("ranks share GPUs: NCCL moves everything as between hosts, and steps are slow");
    }
    trainer = std::make_unique<Trainer>(config, groups, device.stream, signal, std::move(work));
  });
  Ending ending{};
  try {
    ending = trainer->run(*log);
  } catch (...) {
    // They would wait for what is being written, and the other ranks for this one. The process ends soon.
    (void)trainer.release();
    (void)new RunDirectory::Lock(std::move(lock));
    throw;
  }
  world.barrier();
  ranks.wait_for_the_others(session);
  return ending == Ending::kStopped ? kRestartMe : 0;
}

}  // namespace invar::app
