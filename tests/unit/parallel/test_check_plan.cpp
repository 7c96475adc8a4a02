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
  config.model.hf_path = "model";
  config.data.blend = parse_blend("0.7 a 0.3 b");
  config.log.dir = "log";
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

TEST_CASE("ranks with one plan and other values of a key are named, with the first such key") {
  const std::vector<std::pair<std::string, void (*)(Config&)>> changes = {
      {"model.intermediate_size", [](Config& c) { c.model.intermediate_size = 96; }},
      {"model.num_hidden_layers", [](Config& c) { c.model.num_hidden_layers = 2, c.train.seed = 5; }},
      {"model.head_dim", [](Config& c) { c.model.head_dim = 32; }},
      {"numerics.leaves", [](Config& c) { c.numerics.leaves = 4; }},
      {"parallel.sequence", [](Config& c) { c.parallel.sequence = true; }},
      {"parallel.bucket_size", [](Config& c) { c.parallel.bucket_size = 2000; }},
      {"train.sequence_length", [](Config& c) { c.train.sequence_length = 16; }},
      {"optimizer.lr", [](Config& c) { c.optimizer.lr = 1; }},
      {"checkpoint.every", [](Config& c) { c.checkpoint.every = 3; }},
      {"checkpoint.export_dir", [](Config& c) { c.checkpoint.export_dir = "there"; }},
      {"checkpoint.resume", [](Config& c) { c.checkpoint.resume = "never"; }},
      {"data.blend", [](Config& c) { c.data.blend = parse_blend("0.3 a 0.7 b"); }},
      {"data.blend", [](Config& c) { c.data.blend = parse_blend("0.7 a 0.2 b 0.1 c"); }},
      {"log.dir", [](Config& c) { c.log.dir = ""; }},
  };
  for (const auto& [key, change] : changes) compare(3, change, "rank 3 has another " + key + " than rank 0");
  const auto elsewhere = [](Config& c) {
    c.model.hf_path = "/local/copy";
    c.data.blend = parse_blend("0.7 /local/a 0.3 /local/b");
    c.log.dir = "/local/log";
  };
  compare(3, elsewhere, "");
}
