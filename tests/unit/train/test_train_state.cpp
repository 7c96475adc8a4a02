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

TEST_CASE("rows have one owner among equal replicas too if owners of copies would differ") {
  Config config = small_model(4);  // a cut falls into copies
  config.parallel.tensor = 4;
  const auto widths = [&](int data, int failed_slots) {
    config.parallel.data = data;
    config.parallel.nonuniform.failed.clear();
    for (int replica = 0; replica < data; ++replica) {
      for (int slot = 0; slot < failed_slots; ++slot) {
        config.parallel.nonuniform.failed.push_back(format("dp{}.tp{}", replica, slot));
      }
    }
    return training_topology(config, plan_replicas(config, data * (4 - failed_slots))).widths;
  };
  const std::vector<int> uniform;
  CHECK(widths(3, 1) == std::vector<int>{3, 3, 3});  // two of three ranks hold the same KV head
  CHECK(widths(2, 1) == uniform);                    // two terms have one sum
  CHECK(widths(3, 0) == uniform);                    // equal shards
  CHECK(widths(3, 2) == uniform);                    // no copies
  config.parallel.bucket_size = 1;                   // copies in buckets without unequal shards
  CHECK(widths(3, 1) == uniform);
  config.parallel.bucket_size = Config().parallel.bucket_size;
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 3;
  CHECK(widths(3, 1) == uniform);
}
