#include "config/config_changes.h"

#include "config/key_table.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

Config some_config() {
  Config config;
  config.model.hidden_size = 64;
  config.train.steps = 100;
  config.origin["model.hidden_size"] = "run.yaml:3";
  return config;
}

}  // namespace

TEST_CASE("An equal config has no changes") {
  CHECK(config_changes(some_config(), some_config()).empty());
}

TEST_CASE("A change of the recipe is returned with both values") {
  Config now = some_config();
  now.optimizer.lr = 1e-3;
  now.schedule.decay_steps = 50;
  now.data.path = "other.bin";
  const std::vector<ConfigChange> changes = config_changes(some_config(), now);
  REQUIRE(changes.size() == 3);
  CHECK(changes[0].key == "optimizer.lr");
  CHECK(changes[0].before == "0.0003");
  CHECK(changes[0].after == "0.001");
  CHECK(changes[1].key == "schedule.decay_steps");
  CHECK(changes[1].before == "auto");
  CHECK(changes[2].after == "other.bin");
}

TEST_CASE("Layout, folders and the way to the model are nobody's business") {
  Config now = some_config();
  now.parallel.tensor = 4;
  now.train.micro_batch_size = 4;
  now.train.recompute = RecomputeKind::kFull;
  now.model.preset = "qwen3-0.6b";
  now.model.hf_path = "x";
  now.checkpoint.every = 5;
  now.log.dir = "runs/y";
  CHECK(config_changes(some_config(), now).empty());
}

TEST_CASE("A change of the model or of the numerics is refused where it was written") {
  Config now = some_config();
  now.model.hidden_size = 128;
  require_error(ErrorKind::kConfig, {"run.yaml:3", "model.hidden_size is 128", "saved with 64"},
                [&] { config_changes(some_config(), now); });
  now = some_config();
  now.numerics.precision = Precision::kF32;
  require_error(ErrorKind::kConfig, {"numerics.precision is fp32", "bf16"},
                [&] { config_changes(some_config(), now); });
}

TEST_CASE("A portable config stands without its preset") {
  const Config config =
      load_text("model: {preset: qwen3-0.6b, rms_norm_eps: 1e-5}\ntrain: {steps: 9, sequence_length: 8}\n");
  const Config portable = load_config_text(to_portable_yaml(config), "saved");
  CHECK(portable.model.preset.empty());
  CHECK(portable.model.hidden_size == config.model.hidden_size);
  CHECK(portable.model.rms_norm_eps == 1e-5);
  CHECK(config_changes(portable, config).empty());
  require_error(ErrorKind::kConfig, {"saved:1"}, [] { load_config_text("bogus: 3\n", "saved"); });
}
