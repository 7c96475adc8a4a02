#include "train/train_state.h"

#include "comm/self_communicator.h"
#include "small_model.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("a state computes on an invariant stream if its config's numerics are invariant") {
  Config config = small_model(1);
  config.parallel.tensor = 1;
  config.numerics.reduction = GENERATE(Reduction::kFast, Reduction::kInvariant);
  const bool invariant = config.numerics.reduction == Reduction::kInvariant;
  config.numerics.workers = 1;
  const auto world = make_self_communicator();
  const ProcessGroups groups = make_process_groups(*world, {});
  Stream given(DeviceType::kCpu, 3);
  given.set_invariant(!invariant);
  const TrainState state(config, groups, given, measure_memory(config, groups.topology, 0));
  CHECK(state.stream().invariant() == invariant);
  CHECK(state.stream().threads() == 3);
}
