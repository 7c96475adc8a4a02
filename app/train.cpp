#include <optional>

#include "app/commands.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "train/trainer.h"

namespace invar::app {

int train(const TrainArguments& arguments, MpiSession& session) {
  Communicator& world = session.world();
  Config config;
  together(world, [&] {
    config = load_config(arguments.config, arguments.overrides);
    validate(config, world.size());
    check_device(config);
  });
  const Topology topology{config.parallel.tensor, data_degree(config, world.size())};
  const ProcessGroups groups = make_process_groups(world, topology);
  const Stream stream(DeviceType::kCpu, threads_per_rank(session.local_size()));

  const volatile std::sig_atomic_t* signal = checkpoint_dir(config).empty() ? nullptr : catch_stop_signals();
  std::optional<Trainer> trainer;
  std::optional<Log> log;
  together(world, [&] {
    log.emplace(world.rank(), config.log.dir);
    trainer.emplace(config, groups, stream, signal);
  });
  const Ending ending = trainer->run(*log);
  world.barrier();
  return ending == Ending::kStopped ? kRestartMe : 0;
}

}  // namespace invar::app
