#include "app/training_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "parallel/check_plan.h"

namespace invar::app {

std::vector<HostSlot> gather_hosts(MpiSession& session) {
  struct Entry {
    int32_t local_rank = 0;
    std::array<char, 252> host{};
  };
  static_assert(sizeof(Entry) == 64 * sizeof(int32_t));
  Communicator& job = session.world();
  Entry mine;
  mine.local_rank = session.local_rank();
  gethostname(mine.host.data(), mine.host.size() - 1);
  std::vector<Entry> all(static_cast<size_t>(job.size()));
  const auto words = [](Entry* entries, int64_t count) {
    return Tensor(entries, DType::kI32, DeviceType::kCpu, {64 * count});
  };
  job.all_gather(Stream(DeviceType::kCpu), words(&mine, 1), words(all.data(), job.size()),
                 equal_counts(job.size(), 64));
  std::vector<HostSlot> hosts;
  for (const Entry& entry : all) hosts.push_back({entry.host.data(), entry.local_rank});
  return hosts;
}

TrainingRanks::TrainingRanks(Config& config, MpiSession& session, std::span<const HostSlot> hosts)
    : plan_(plan_replicas(config, session.world().size(), hosts)), world_(&session.world()) {
  adopt_plan(config);
  const std::vector<int> order = plan_.training_order();
  const int rank = session.world().rank();
  const bool as_launched = std::ssize(order) == session.world().size() && std::is_sorted(order.begin(), order.end());
  if (as_launched) return;
  const auto place = std::find(order.begin(), order.end(), rank);
  const bool trains = place != order.end();
  part_ = session.world().split(trains ? 0 : -1, static_cast<int>(place - order.begin()), "world");
  world_ = part_.get();
}

// Collective over world_.
void TrainingRanks::adopt_plan(Config& config) {
  check_plan(config, plan_, *world_);
  remarks_ = plan_remarks(config, plan_);
  if (is_whole_grid(config, plan_)) return;
  config.train.global_batch_size = plan_.batch();
  config.parallel.nonuniform.batch = BatchPolicy::kKeep;  // what this config says shrinks no further
}

void TrainingRanks::share_anew(Config& config, std::span<const HostSlot> hosts) {
  const std::vector<ReplicaPlan::Place> places = plan_.places;
  plan_ = plan_replicas(config, static_cast<int>(places.size()), hosts);
  INVAR_CHECK(plan_.places == places, "other speeds move ranks");
  adopt_plan(config);
}

int TrainingRanks::wait_for_the_others(MpiSession& session) const {
  if (plan_.training_ranks() < session.world().size()) session.meet_at_the_end(idle());
  return 0;
}

}  // namespace invar::app
