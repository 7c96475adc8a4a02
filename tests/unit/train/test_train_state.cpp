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

TEST_CASE("a rank's memory has room for the proofs of invariant numerics in bf16 on GPUs, and for none elsewhere") {
  Config config = small_model(1);
  config.parallel.tensor = 1;
  config.model.vocab_size = 4096;
  config.numerics.precision = Precision::kBF16;
  config.numerics.workers = 1;
  config.numerics.leaves = 1;
  const auto proofs = [&](Reduction reduction, DeviceType target) {
    config.numerics.reduction = reduction;
    return measure_memory(config, {}, 0, target).proofs;
  };
  CHECK(proofs(Reduction::kFast, DeviceType::kCuda) == 0);
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCpu) == 0);
  // The largest is that of the head's weights: their gradient in f32, and the gradients of 8 tokens' logits.
  const int64_t head = 4096 * 32 * 4 + 8 * 4096 * 2;
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) >= head);
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) < head + 8192);
  config.numerics.precision = Precision::kF32;
  CHECK(proofs(Reduction::kInvariant, DeviceType::kCuda) == 0);
}
