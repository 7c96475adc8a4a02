// The rank grid is the only place that knows an axis by name: a new one trains without a change elsewhere.
#include <map>
#include <mutex>

#include "comm/thread_communicator.h"
#include "invariant_models.h"
#include "support/catch.h"
#include "support/errors.h"
#include "train/step_hash.h"

using namespace invar;
using namespace invar::test;

namespace {

const Axis kMore{"more", 2, false, true};       // holds copies of the same rows, reads other samples
const Axis kGathers{"gathers", 2, true, true};  // as generalised tensor parallelism: holds other rows, reads others

// The combined hash of the weights after three steps, and the losses.
std::vector<uint64_t> train_on(const Config& config, const Topology& topology) {
  std::vector<uint64_t> seen;
  std::mutex mutex;
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, topology);
    MockRun run(config, groups);
    std::vector<uint64_t> mine;
    for (int64_t step = 0; step < 3; ++step) {
      const StepResult result = run.train(step);
      mine.push_back(std::bit_cast<uint64_t>(result.loss));
      mine.push_back(std::bit_cast<uint64_t>(result.grad_norm));
    }
    for (const TensorHash& tensor : hash_state(run.state, groups, StateKind::kWeights)) {
      for (const int64_t block : tensor.blocks) mine.push_back(static_cast<uint64_t>(block));
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) seen = std::move(mine);
  });
  return seen;
}

std::vector<int> members(Communicator& group, int world_rank) {
  std::vector<int64_t> mine = {world_rank}, all(static_cast<size_t>(group.size()));
  group.all_gather(Stream(DeviceType::kCpu), view_of(mine), view_of(all), equal_counts(group.size(), 1));
  return {all.begin(), all.end()};
}

}  // namespace

TEST_CASE("an axis that reads samples of its own trains as more data ranks, to the bit") {
  for (const Reduction reduction : {Reduction::kInvariant, Reduction::kFast}) {
    Config config = tied_qwen3(Precision::kF32);
    config.numerics.reduction = reduction;
    config.parallel.sequence = true;
    config.train.micro_batch_size = 1;
    const std::vector<uint64_t> four = train_on(config, {2, 4});
    CHECK(train_on(config, {2, 2, {}, {}, {kMore}}) == four);
    CHECK(train_on(config, {2, 1, {}, {}, {kMore, {"most", 2, false, true}}}) == four);
    CHECK((train_on(config, {1, 1}) == four) == (reduction == Reduction::kInvariant));
  }
}

TEST_CASE("who holds the same shard and who reads other samples are two questions") {
  const Topology topology{2, 2, {}, {}, {kGathers}};
  CHECK(topology.world() == 8);
  CHECK(topology.replicas() == 2);
  CHECK(topology.readers() == 4);
  CHECK(topology.samples_of(8, 3) == Range{6, 8});
  CHECK(topology.describe(true) == "tensor 2 with sequence parallelism x gathers 2 x data 2");
  std::map<int, std::vector<std::vector<int>>> groups_of;
  std::mutex mutex;
  run_thread_ranks(8, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, topology);
    const std::vector<std::vector<int>> mine = {members(*groups.tensor, world.rank()),
                                                members(*groups.holders, world.rank()),
                                                members(groups.readers(), world.rank()),
                                                {groups.replica(), groups.reader()}};
    const std::lock_guard lock(mutex);
    groups_of[world.rank()] = mine;
  });
  using Groups = std::vector<std::vector<int>>;
  CHECK(groups_of[0] == Groups{{0, 1}, {0, 4}, {0, 2, 4, 6}, {0, 0}});
  CHECK(groups_of[3] == Groups{{2, 3}, {3, 7}, {1, 3, 5, 7}, {0, 1}});
  CHECK(groups_of[6] == Groups{{6, 7}, {2, 6}, {0, 2, 4, 6}, {1, 3}});
}

TEST_CASE("an axis whose ranks would all do the same is refused") {
  run_thread_ranks(2, [&](Communicator& world) {
    const Topology topology{1, 1, {}, {}, {{"twice", 2, false, false}}};
    CHECK_THROWS_AS(make_process_groups(world, topology), Error);
  });
}
