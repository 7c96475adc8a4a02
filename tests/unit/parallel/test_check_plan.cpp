#include "parallel/check_plan.h"

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

// What seven ranks are told, of which one has a config with something changed.
void compare(int other, void (*change)(Config&), const std::string& expected) {
  Config config;
  config.parallel.tensor = 4;
  config.parallel.nonuniform.tensor_widths = {4, 3};
  config.model.num_attention_heads = config.model.num_key_value_heads = 4;
  config.model.hidden_size = config.model.intermediate_size = config.model.vocab_size = 64;
  config.model.num_hidden_layers = 1;
  config.model.head_dim = 16;
  config.train.sequence_length = 8;
  config.train.global_batch_size = 8;
  run_thread_ranks(7, [&](Communicator& world) {
    Config own = config;
    if (world.rank() == other) change(own);
    std::string message;
    try {
      check_plan(own, plan_replicas(own, 7), world);
    } catch (const Error& error) {
      message = error.what();
    }
    CHECK(message == expected);
  });
}

}  // namespace

TEST_CASE("ranks with one plan go on, others are named on every rank") {
  const auto more_samples = [](Config& c) { c.train.global_batch_size = 9; };
  compare(-1, more_samples, "");
  compare(0, more_samples, "rank 1 plans other replicas than rank 0");
  compare(2, more_samples, "rank 2 plans other replicas than rank 0");
  compare(6, more_samples, "rank 6 plans other replicas than rank 0");
}

TEST_CASE("ranks with one plan of other models are named too") {
  const std::vector<void (*)(Config&)> changes = {
      [](Config& c) { c.model.intermediate_size = 96; }, [](Config& c) { c.model.num_hidden_layers = 2; },
      [](Config& c) { c.model.head_dim = 32; },          [](Config& c) { c.numerics.leaves = 4; },
      [](Config& c) { c.parallel.sequence = true; },     [](Config& c) { c.train.sequence_length = 16; },
  };
  const std::string expected =
      "rank 3 has another model, parallel, numerics or train section of the config than rank 0";
  for (const auto change : changes) compare(3, change, expected);
  compare(
      3, [](Config& c) { c.model.hf_path = "/local/copy"; }, "");
  compare(
      3, [](Config& c) { c.log.dir = "/local/log"; }, "");
}
