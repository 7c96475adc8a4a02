#include <optional>

#include "app/commands.h"
#include "app/rank_device.h"
#include "checkpoint/run_directory.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "train/trainer.h"

namespace invar::app {

int train(const TrainArguments& arguments, MpiSession& session) {
  Communicator& world = session.world();
  Config config;
  RunDirectory::Lock lock;  // before anybody looks for the latest checkpoint
  together(world, [&] {
    config = load_config(arguments.config, arguments.overrides);
    validate(config, world.size());
    choose_device(config);
    const std::string dir = checkpoint_dir(config);
    if (world.rank() == 0 && !dir.empty()) lock = RunDirectory(dir).lock();
  });
  const Topology topology{config.parallel.tensor, data_degree(config, world.size())};
  const RankDevice device = open_device(config, session);
  const ProcessGroups groups = make_process_groups(*device.world, topology);

  const volatile std::sig_atomic_t* signal = checkpoint_dir(config).empty() ? nullptr : catch_stop_signals();
  std::unique_ptr<Trainer> trainer;
  std::optional<Log> log;
  together(world, [&] {
    log.emplace(world.rank(), config.log.dir);
    trainer = std::make_unique<Trainer>(config, groups, device.stream, signal);
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
  return ending == Ending::kStopped ? kRestartMe : 0;
}

}  // namespace invar::app
